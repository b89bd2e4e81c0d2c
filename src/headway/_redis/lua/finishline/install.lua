-- install.lua: a project that Redis lost comes back whole, in one step, unless it is there already.
-- include: finishline/project
-- KEYS[6] smap:proj:{id}:bits:{token}   KEYS[7] smap:proj:{id}:seen:{token}: staged identities
-- ARGV[4] status   ARGV[5] total   ARGV[6] done   ARGV[7] errors   ARGV[8] epoch   ARGV[9] version
-- ARGV[10] "crawled" | ""   ARGV[11] "journal" | ""   ARGV[12] "delivered" when its event was delivered already, else ""
-- ARGV[13] time of the checkpoint these counts are from, "" when they are exact
-- returns RESTORED | COMPLETED | EXISTS (it is there; a live counter is never lowered) | AGAIN (staged ids are lost)
if not missing then
  redis.call('DEL', KEYS[6], KEYS[7])
  -- There, but with less than its own checkpoint: an older state came back. With a journal the count goes by identity.
  if not read() or ARGV[11] ~= '' or meta.epoch ~= ARGV[8] or done >= tonumber(ARGV[6]) then
    return { 'EXISTS', 0, 0 }
  end
  done, errors = tonumber(ARGV[6]), math.max(errors, tonumber(ARGV[7]))
  redis.call('HSET', KEYS[1], 'done', ARGV[6], 'errors', string.format('%.0f', errors))
  if ARGV[13] ~= '' then redis.call('HSET', KEYS[1], 'restored', ARGV[13]) end
  return answer(finished(ARGV[12] ~= '') and 'COMPLETED' or 'RESTORED', 0)
end
-- A count without its identities would count again: a wipe between staging and this must not go unnoticed.
if ARGV[11] ~= '' and redis.call('BITCOUNT', KEYS[6]) + redis.call('SCARD', KEYS[7]) ~= tonumber(ARGV[6]) then
  redis.call('DEL', KEYS[6], KEYS[7])
  return { 'AGAIN', 0, 0 }
end
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
local kinds = ''
if redis.call('EXISTS', KEYS[6]) == 1 then
  redis.call('RENAME', KEYS[6], KEYS[3])
  kinds = 'b'
end
if redis.call('EXISTS', KEYS[7]) == 1 then
  redis.call('RENAME', KEYS[7], KEYS[4])
  kinds = kinds .. 's'
end
redis.call('HSET', KEYS[1], 'status', ARGV[4], 'total', ARGV[5], 'done', ARGV[6], 'errors', ARGV[7])
if ARGV[13] ~= '' then redis.call('HSET', KEYS[1], 'restored', ARGV[13]) end
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], 'epoch', ARGV[8], 'version', ARGV[9])
if ARGV[10] ~= '' then redis.call('HSET', KEYS[2], 'crawled', 1) end
if ARGV[11] ~= '' then redis.call('HSET', KEYS[2], 'journal', 1) end
keep()
read()
return answer(finished(ARGV[12] ~= '') and 'COMPLETED' or 'RESTORED', 0, kinds)
