-- states/delete.lua: remove a job with its states and log.
-- KEYS[1] headway:states:{id}       KEYS[2] headway:states:{id}:states   KEYS[3] headway:states:{id}:log
-- KEYS[4] headway:states:{id}:writers
-- KEYS[5] headway:states            set of the ids of all jobs
-- ARGV[1] job id   ARGV[2] incarnation, or "" for any   ARGV[3] its change number, or "" for any
-- returns the number of deleted keys; 0 for another incarnation or a later change number
local job = redis.call('HMGET', KEYS[1], 'incarnation', 'change')
if ARGV[2] ~= '' and job[1] and job[1] ~= ARGV[2] then return 0 end
if ARGV[3] ~= '' and job[2] ~= ARGV[3] then return 0 end
-- Delete the keys first: without the right to delete, the job must stay listed.
local removed = redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4])
redis.call('SREM', KEYS[5], ARGV[1])
return removed
