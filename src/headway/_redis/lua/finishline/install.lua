-- install.lua: install a project from its SQL record in one step, unless Redis has it.
-- include: finishline/project
-- KEYS[6] smap:proj:{id}:bits:{token}   KEYS[7] smap:proj:{id}:seen:{token}: staged identities
-- KEYS[8] smap:proj:{id}:rebuild   string   the lease that the caller holds, "token owner"
-- ARGV[4] status   ARGV[5] total   ARGV[6] done   ARGV[7] errors   ARGV[8] epoch   ARGV[9] version
-- ARGV[10] "crawled" | ""   ARGV[11] "journal" | ""
-- ARGV[12] "completed" if it is DONE in SQL, "delivered" if its event needs no announcement either, else ""
-- ARGV[13] time of the checkpoint of these counts, "" if they are exact   ARGV[14] value that the lease must have
-- ARGV[15] id of the database that has its record
-- returns RESTORED | COMPLETED | EXISTS (a live counter is never lowered) | AGAIN (stage the identities first)
--         | STALE (the lease is lost) | UNRECORDED (Redis has a project of this name with another record, or none)
if redis.call('GET', KEYS[8]) ~= ARGV[14] then
  redis.call('DEL', KEYS[6], KEYS[7])
  return { 'STALE', 0, 0 }
end
local completed, delivered = ARGV[12] ~= '', ARGV[12] == 'delivered'
if not missing then
  local sound = read()
  local other = meta.epoch ~= ARGV[8]
  if other and redis.call('HGET', KEYS[2], 'record') ~= ARGV[15] then
    redis.call('DEL', KEYS[6], KEYS[7])
    return { 'UNRECORDED', 0, 0 }
  end
  local behind = sound and (done < tonumber(ARGV[6]) or (completed and status ~= 'DONE'))
  if not other and (not behind or (ARGV[11] ~= '' and not completed)) then
    redis.call('DEL', KEYS[6], KEYS[7]) -- with a journal the checkpointer raises the count by identity
    return { 'EXISTS', 0, 0 }
  end
  if not other and ARGV[11] == '' then
    -- It has less than its own checkpoint: Redis came back with an older state.
    done, errors = math.max(done, tonumber(ARGV[6])), math.max(errors, tonumber(ARGV[7]))
    redis.call('HSET', KEYS[1], 'done', string.format('%.0f', done), 'errors', string.format('%.0f', errors))
    if completed or tonumber(ARGV[9]) > meta.version then -- otherwise it would complete by an older total
      status, total, meta.crawled = ARGV[4], tonumber(ARGV[5]), ARGV[10] ~= ''
      redis.call('HSET', KEYS[1], 'total', ARGV[5], 'status', status)
      redis.call('HSET', KEYS[2], 'version', ARGV[9])
      if meta.crawled then redis.call('HSET', KEYS[2], 'crawled', 1) else redis.call('HDEL', KEYS[2], 'crawled') end
    end
    if ARGV[13] ~= '' then redis.call('HSET', KEYS[1], 'restored', ARGV[13]) end
    return { finished(completed, delivered, true) and 'COMPLETED' or 'RESTORED', done, 0 }
  end
  -- Otherwise it is a deleted project of this name, or a completed one that came back older.
end
-- Without their identities the items would count again, so notice if Redis was wiped since they were staged.
if ARGV[11] ~= '' and redis.call('BITCOUNT', KEYS[6]) + redis.call('SCARD', KEYS[7]) ~= tonumber(ARGV[6]) then
  redis.call('DEL', KEYS[6], KEYS[7])
  return { 'AGAIN', 0, 0 }
end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4])
local kinds = ''
if redis.call('EXISTS', KEYS[6]) == 1 then
  redis.call('RENAME', KEYS[6], KEYS[3])
  kinds = 'b'
end
if redis.call('EXISTS', KEYS[7]) == 1 then
  redis.call('RENAME', KEYS[7], KEYS[4])
  kinds = kinds .. 's'
end
status, total, done, errors = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
redis.call('HSET', KEYS[1], 'status', status, 'total', ARGV[5], 'done', ARGV[6], 'errors', ARGV[7])
if ARGV[13] ~= '' then redis.call('HSET', KEYS[1], 'restored', ARGV[13]) end
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], 'epoch', ARGV[8], 'version', ARGV[9], 'record', ARGV[15], 'kinds', kinds)
if ARGV[10] ~= '' then redis.call('HSET', KEYS[2], 'crawled', 1) end
if ARGV[11] ~= '' then redis.call('HSET', KEYS[2], 'journal', 1) end
keep()
read()
return { finished(completed, delivered, true) and 'COMPLETED' or 'RESTORED', done, 0 }
