-- project.lua: common part of the scripts that change a project. Included, never run alone.
-- KEYS[1] smap:proj:{id}        hash    status total done errors
-- KEYS[2] smap:proj:{id}:meta   hash    epoch, version, record, crawled, journal, kinds, hours;
--                                       per caller "call outcome done fresh hours"
-- KEYS[3] smap:proj:{id}:bits   string  bitmap of counted item numbers
-- KEYS[4] smap:proj:{id}:seen   set     other counted items
-- KEYS[5] smap:events           stream  outbox
-- ARGV[1] ttl   ARGV[2] caller   ARGV[3] number of this call of the caller
-- returns {outcome, done, new items}, and the epoch if the call was accepted;
--         outcome is COUNTED | DUPLICATE | UPDATED | LATE | COMPLETED | NOT_FOUND | ...

-- Read first: a key of another type fails the script before it writes.
local state = redis.call('HMGET', KEYS[1], 'status', 'total', 'done', 'errors')
local status, total, done, errors = state[1], tonumber(state[2]), tonumber(state[3]), tonumber(state[4])

-- EXPIRE tells whether the project exists: an expired project must not come back as a counter without identities. It is the
-- first write, because a server at its maxmemory refuses the first write of a script, but never EXPIRE.
local missing = redis.call('EXPIRE', KEYS[1], ARGV[1]) == 0
local meta_life = redis.call('TTL', KEYS[2])

local meta = {}

local function read()
  local notes = redis.call('HMGET', KEYS[2], ARGV[2], 'version', 'crawled', 'journal', 'epoch', 'kinds', 'hours')
  meta = { note = notes[1], version = tonumber(notes[2] or 0), crawled = notes[3], journal = notes[4],
    epoch = notes[5], kinds = notes[6] or '', hours = notes[7] or '0' }
  return status and total and done and errors
end

-- Whether this is another project of the same name than the one in SQL: it was deleted and created again since, or an older
-- dump brought back the deleted one.
local function remade(epoch)
  return epoch ~= '' and meta.epoch and meta.epoch ~= epoch
end

-- Forget callers without a call for a day: a call is repeated within seconds. `hours` counts the runs of this function, which
-- are at least an hour apart. Names of callers contain a dot, other fields do not.
local function forget_callers()
  local hours = redis.call('HINCRBY', KEYS[2], 'hours', 1)
  local fields = redis.call('HGETALL', KEYS[2])
  for i = 1, #fields, 2 do
    if string.find(fields[i], '.', 1, true) then
      local at = tonumber(string.match(fields[i + 1], ' (%d+)$'))
      if not at or hours - at > 24 then redis.call('HDEL', KEYS[2], fields[i]) end
    end
  end
end

-- The companion keys outlive the hash by two hours, so it never exists without its identities. Each script refreshes them with
-- the hash once one of the two hours has passed, and after a call that created one of them.
local function keep()
  local longer = ARGV[1] + 7200
  redis.call('EXPIRE', KEYS[2], longer)
  redis.call('EXPIRE', KEYS[3], longer)
  redis.call('EXPIRE', KEYS[4], longer)
end
if not missing and meta_life < ARGV[1] + 3600 then
  keep()
  if meta_life >= 0 then forget_callers() end
end

-- The earlier answer to a call that is repeated after a lost reply. A caller makes one call at a time and numbers its calls,
-- so its last answer is enough.
local function earlier()
  if not meta.note then return nil end
  local call, outcome, then_done, fresh = string.match(meta.note, '^(%d+) (%S+) (%d+) (%d+)')
  if not call or tonumber(ARGV[3]) > tonumber(call) then return nil end
  return { outcome, tonumber(then_done), tonumber(fresh), meta.epoch or '' }
end

local function answer(outcome, fresh, kinds)
  local note = ARGV[3] .. ' ' .. outcome .. ' ' .. string.format('%.0f', done) .. ' ' .. fresh .. ' ' .. meta.hours
  if kinds and kinds ~= meta.kinds then
    redis.call('HSET', KEYS[2], ARGV[2], note, 'kinds', kinds)
    keep()
  else
    redis.call('HSET', KEYS[2], ARGV[2], note)
    if meta_life < 0 then keep() end
  end
  return { outcome, done, fresh, meta.epoch or '' }
end

-- The number below which a bit takes less memory than a member of the set (about 64 bytes), by the items counted and expected
-- so far. An item is in one of the two; which one may depend on when it was counted.
local function dense()
  return math.max(32768, 512 * done, 8 * total)
end

-- The finish line: completes the project if all items are counted, and announces it in the same step. No other code does.
-- An empty project completes only by the end of its crawl. With counted items it needs a total above 0. An operator sets
-- FAILED, and it stays. `completed`: SQL knows the completion already, which a late item does not revoke.
-- `again`: the event may have been announced before, so the relay asks SQL which sinks took it.
local function finished(completed, delivered, again)
  if status == 'DONE' or status == 'CRAWLING' or status == 'FAILED' then return false end
  if not completed and (done < total or (total == 0 and (done > 0 or not meta.crawled))) then return false end
  status = 'DONE'
  redis.call('HSET', KEYS[1], 'status', status)
  if delivered then return true end
  local project = string.sub(KEYS[1], 11)
  local time = redis.call('TIME')
  -- No MAXLEN: an event stays until every sink took it.
  local event = {
    'id', 'job.completed:' .. project .. ':' .. (meta.epoch or '0'),
    'type', 'job.completed', 'source', 'finishline', 'job', project,
    'at', time[1] .. '.' .. string.format('%06d', time[2]), 'version', 1,
    'data', string.format('{"total":%.0f,"succeeded":%.0f,"failed":%.0f}', total, done - errors, errors) }
  if again then
    event[#event + 1] = 'again'
    event[#event + 1] = 1
  end
  redis.call('XADD', KEYS[5], '*', unpack(event))
  return true
end
