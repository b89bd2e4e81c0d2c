-- states/delete.lua: remove a job with its states and log.
-- KEYS[1] headway:states:{id}   KEYS[2] headway:states:{id}:states   KEYS[3] headway:states:{id}:log
-- KEYS[4] headway:states        set of the ids of all jobs
-- ARGV[1] job id
-- returns how many of the job's keys there were
redis.call('SREM', KEYS[4], ARGV[1])
return redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
