-- queue/hint.lua: push hints for tasks into a queue of RQ, up to its limit, and set the keys of their users.
-- KEYS[1] rq:queues              set     RQ's queues
-- KEYS[2] rq:queue:{name}        list    ids of jobs
-- KEYS[3 ...] rq:job:{id}        hash    one per task, then one user key per task
-- ARGV[1] maximum length of the queue   ARGV[2] number of tasks   ARGV[3] seconds until a user key expires
-- ARGV[4] number of words that all jobs have in common, then those fields and values; then id and data of each task; then the
-- value of each user key
-- returns how many tasks, from the first on, are in the queue
local tasks, common = tonumber(ARGV[2]), tonumber(ARGV[4])
local fields = {unpack(ARGV, 5, 4 + common)}
local taken = math.min(tasks, tonumber(ARGV[1]) - redis.call('LLEN', KEYS[2]))
local next = 5 + common
for n = 1, taken do
  fields[common + 1], fields[common + 2] = 'data', ARGV[next + 1]
  local kept = redis.pcall('HSET', KEYS[2 + n], unpack(fields))
  if type(kept) == 'table' then
    if string.sub(kept.err, 1, 9) ~= 'WRONGTYPE' then
      return kept
    end
    -- A foreign key has this name. Without its removal all other tasks would get no hint.
    redis.call('DEL', KEYS[2 + n])
    redis.call('HSET', KEYS[2 + n], unpack(fields))
  end
  redis.call('RPUSH', KEYS[2], ARGV[next])
  next = next + 2
end
if taken > 0 then
  redis.call('SADD', KEYS[1], KEYS[2])
end
for n = 3 + tasks, #KEYS do
  redis.call('SET', KEYS[n], ARGV[5 + common + 2 * tasks + n - 3 - tasks], 'EX', ARGV[3])
end
return math.max(taken, 0)
