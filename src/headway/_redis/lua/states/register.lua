-- states/register.lua: create the record of a job unless it exists.
-- KEYS[1] headway:states:{id}      hash   num_tasks created_at incarnation deleted history change
-- KEYS[2] headway:states           set    ids of all jobs
-- ARGV[1] job id   ARGV[2] number of tasks   ARGV[3] incarnation   ARGV[4] "1" to keep history, else "0"
-- returns the hash, as field, value, field, value, ...
if redis.call('EXISTS', KEYS[1]) == 0 then
  local now = redis.call('TIME')
  redis.call('HSET', KEYS[1], 'num_tasks', ARGV[2], 'created_at', now[1] .. string.format('%06d', now[2]),
    'incarnation', ARGV[3], 'deleted', '0', 'history', ARGV[4], 'change', '0')
  redis.call('SADD', KEYS[2], ARGV[1])
end
return redis.call('HGETALL', KEYS[1])
