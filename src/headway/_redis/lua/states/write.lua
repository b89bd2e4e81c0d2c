-- states/write.lua: the next version of one key, and its entry in the log.
-- KEYS[1] headway:states:{id}          hash    the job; its change number counts the entries of the log
-- KEYS[2] headway:states:{id}:states   hash    task-tag -> "version event_id microseconds body"
-- KEYS[3] headway:states:{id}:log      stream  change, incarnation, state
-- ARGV[1] task-tag   ARGV[2] event id   ARGV[3] body (JSON)   ARGV[4] entries of the log to keep
-- returns "STORED" | "DUPLICATE" | "NOT_FOUND" | "DELETED", then the state as it is stored
local job = redis.call('HMGET', KEYS[1], 'incarnation', 'deleted', 'history')
if not job[1] then return {'NOT_FOUND'} end
if job[2] == '1' then return {'DELETED'} end
local stored = redis.call('HGET', KEYS[2], ARGV[1])
local version = 1
if stored then
  local number, event = string.match(stored, '^(%d+) (%S+) ')
  if event == ARGV[2] then return {'DUPLICATE', stored} end
  version = tonumber(number) + 1
end
local now = redis.call('TIME')
local state = string.format('%d %s %s%06d %s', version, ARGV[2], now[1], now[2], ARGV[3])
redis.call('HSET', KEYS[2], ARGV[1], state)
local change = redis.call('HINCRBY', KEYS[1], 'change', 1)
if job[3] == '1' then
  redis.call('XADD', KEYS[3], '*', 'change', change, 'incarnation', job[1], 'state', state)
else
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[4], '*', 'change', change, 'incarnation', job[1], 'state', state)
end
return {'STORED', state}
