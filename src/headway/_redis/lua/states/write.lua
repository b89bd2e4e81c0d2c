-- states/write.lua: store the next version of one key and append it to the log.
-- KEYS[1] headway:states:{id}           hash    the job; its change number counts the entries of the log
-- KEYS[2] headway:states:{id}:states    hash    task-tag -> "version event_id microseconds body"
-- KEYS[3] headway:states:{id}:log       stream  change, incarnation, state
-- KEYS[4] headway:states:{id}:writers   hash    task-tag -> "writer", then " writer:event_id:version:microseconds" of
--                                               each earlier writer's last event, newest first
-- ARGV[1] task-tag   ARGV[2] event id   ARGV[3] body (JSON)   ARGV[4] entries of the log to keep
-- ARGV[5] incarnation   ARGV[6] writer   ARGV[7] characters of earlier writers to keep
-- returns "STORED" | "REPEATED" with version and microseconds, "DUPLICATE" with the stored state,
--         "GONE" with the job's incarnation (empty: no job), "DELETED"
local job = redis.call('HMGET', KEYS[1], 'incarnation', 'deleted', 'history')
if job[1] ~= ARGV[5] then return {'GONE', job[1] or ''} end
if job[2] == '1' then return {'DELETED'} end
local stored = redis.call('HGET', KEYS[2], ARGV[1])
local version = 1
if stored then
  local number, event, time = string.match(stored, '^(%d+) (%S+) (%d+) ')
  if event == ARGV[2] then return {'DUPLICATE', stored} end
  local writers = redis.call('HGET', KEYS[4], ARGV[1]) or '-'
  local last = string.match(writers, '^%S+')
  local earlier = string.sub(writers, #last + 1)
  for known, was, at in string.gmatch(earlier, ' [^ :]+:([^ :]+):(%d+):(%d+)') do -- a version may be the same number
    if known == ARGV[2] then return {'REPEATED', was, at} end
  end
  version = tonumber(number) + 1
  if last ~= ARGV[6] then
    local own = string.find(earlier, ' ' .. ARGV[6] .. ':', 1, true)
    if own then
      local following = string.find(earlier, ' ', own + 1, true)
      earlier = string.sub(earlier, 1, own - 1) .. (following and string.sub(earlier, following) or '')
    end
    earlier = ' ' .. last .. ':' .. event .. ':' .. number .. ':' .. time .. earlier
    while #earlier > tonumber(ARGV[7]) do earlier = string.match(earlier, '^(.*) %S+$') end
    redis.call('HSET', KEYS[4], ARGV[1], ARGV[6] .. earlier)
  end
else
  redis.call('HSET', KEYS[4], ARGV[1], ARGV[6])
end
local now = redis.call('TIME')
local microseconds = string.format('%s%06d', now[1], now[2])
local state = string.format('%d %s %s %s', version, ARGV[2], microseconds, ARGV[3])
redis.call('HSET', KEYS[2], ARGV[1], state)
local change = redis.call('HINCRBY', KEYS[1], 'change', 1)
if job[3] == '1' then
  redis.call('XADD', KEYS[3], '*', 'change', change, 'incarnation', job[1], 'state', state)
else
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[4], '*', 'change', change, 'incarnation', job[1], 'state', state)
end
return {'STORED', version, microseconds}
