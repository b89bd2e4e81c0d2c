-- project.lua: what the changes of a project have in common. Included, never run by itself.
-- KEYS[1] smap:proj:{id}        hash    status total done errors
-- KEYS[2] smap:proj:{id}:meta   hash    epoch, version, record, crawled, journal, kinds, hours;
--                                       per caller "call outcome done fresh hours"
-- KEYS[3] smap:proj:{id}:bits   string  bitmap of item numbers counted
-- KEYS[4] smap:proj:{id}:seen   set     other items counted
-- KEYS[5] smap:events           stream  outbox
-- ARGV[1] ttl   ARGV[2] caller   ARGV[3] number of the caller's call
-- returns {outcome, done, fresh} and, of a call that was taken, the epoch;
--         outcome is COUNTED | DUPLICATE | UPDATED | LATE | COMPLETED | NOT_FOUND | ...

-- Read first: a key of another type ends the script here, before anything is written.
local state = redis.call('HMGET', KEYS[1], 'status', 'total', 'done', 'errors')
local status, total, done, errors = state[1], tonumber(state[2]), tonumber(state[3]), tonumber(state[4])

-- A project that expired must not come back as a lone counter: EXPIRE finds out whether it is there. It is also
-- the first write on purpose, for a server at its maxmemory refuses a script's first write only, and never EXPIRE.
local missing = redis.call('EXPIRE', KEYS[1], ARGV[1]) == 0
local meta_life = redis.call('TTL', KEYS[2])

local meta = {}

local function read()
  local notes = redis.call('HMGET', KEYS[2], ARGV[2], 'version', 'crawled', 'journal', 'epoch', 'kinds', 'hours')
  meta = { note = notes[1], version = tonumber(notes[2] or 0), crawled = notes[3], journal = notes[4],
    epoch = notes[5], kinds = notes[6] or '', hours = notes[7] or '0' }
  return status and total and done and errors
end

-- Whether this is another project of the same name than the one SQL told of: it was deleted and created again between
-- SQL and this script, or an older dump brought back the one that was deleted.
local function remade(epoch)
  return epoch ~= '' and meta.epoch and meta.epoch ~= epoch
end

-- Forget callers that have not called for a day: their processes have ended, and a lost reply is asked for again
-- within seconds. `hours` counts the times this was called, which are an hour apart or more. Names of callers have a
-- dot, the other fields have none.
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

-- Companions outlive the hash by two hours, so that it is never without its identities. Whatever refreshes the hash
-- refreshes them: here, for every script and every answer, when one of the two hours has passed; and at the end of a
-- call that made a new one.
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

-- The earlier answer to a call that is repeated because its reply was lost. A caller makes one call at a time and
-- numbers them, so that its last call is all there is to remember.
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

-- Up to which number a bit costs less than a member of the set (about 64 bytes): by the items counted so far, and by
-- those that are expected. An item is in one of the two; which one may depend on when it came.
local function dense()
  return math.max(32768, 512 * done, 8 * total)
end

-- The finish line: the only place where a project becomes DONE, and where that is announced, in one step.
-- An empty project is finished only by the end of its crawl; items that are through want a total that says so.
-- FAILED is an operator's word and stays. What SQL knows to be completed was decided before, by what stood then: an item
-- that came after an empty project was finished does not take that back.
-- `again`: the event may have been announced before, so the relay asks SQL which sinks took it.
local function finished(completed, delivered, again)
  if status == 'DONE' or status == 'CRAWLING' or status == 'FAILED' then return false end
  if not completed and (done < total or (total == 0 and (done > 0 or not meta.crawled))) then return false end
  status = 'DONE'
  redis.call('HSET', KEYS[1], 'status', status)
  if delivered then return true end
  local project = string.sub(KEYS[1], 11)
  local time = redis.call('TIME')
  -- Nothing is trimmed here: an event stays until every sink took it.
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
