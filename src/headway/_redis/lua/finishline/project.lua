-- project.lua: what the changes of a project have in common. Included, never run by itself.
-- KEYS[1] smap:proj:{id}        hash    status total done errors
-- KEYS[2] smap:proj:{id}:meta   hash    epoch, version, crawled, journal, kinds; per caller "call outcome done fresh"
-- KEYS[3] smap:proj:{id}:bits   string  bitmap of item numbers counted
-- KEYS[4] smap:proj:{id}:seen   set     other item ids counted
-- KEYS[5] smap:events           stream  outbox
-- ARGV[1] ttl   ARGV[2] caller   ARGV[3] number of the caller's call
-- returns {outcome, done, fresh}; outcome is COUNTED | DUPLICATE | UPDATED | LATE | COMPLETED | NOT_FOUND | ...

-- A project that expired must not come back as a lone counter: EXPIRE finds out whether it is there. It is also
-- the first write on purpose, for a server at its maxmemory refuses a script's first write only, and never EXPIRE.
local missing = redis.call('EXPIRE', KEYS[1], ARGV[1]) == 0

local status, total, done, errors
local meta = {}

local function read()
  local state = redis.call('HMGET', KEYS[1], 'status', 'total', 'done', 'errors')
  local notes = redis.call('HMGET', KEYS[2], ARGV[2], 'version', 'crawled', 'journal', 'epoch', 'kinds')
  status, total, done, errors = state[1], tonumber(state[2]), tonumber(state[3]), tonumber(state[4])
  meta = { note = notes[1], version = tonumber(notes[2] or 0), crawled = notes[3], journal = notes[4],
    epoch = notes[5], kinds = notes[6] or '' }
  return status and total and done and errors
end

-- The earlier answer to a call that is repeated because its reply was lost. A caller makes one call at a time and
-- numbers them, so that its last call is all there is to remember.
local function earlier()
  if not meta.note then return nil end
  local call, outcome, then_done, fresh = string.match(meta.note, '^(%d+) (%S+) (%d+) (%d+)$')
  if tonumber(ARGV[3]) > tonumber(call) then return nil end
  return { outcome, tonumber(then_done), tonumber(fresh) }
end

-- Companions outlive the hash by two hours, so that it is never without its identities, and are refreshed when one
-- of the two has passed or when the call began a new one.
local function keep()
  local longer = ARGV[1] + 7200
  redis.call('EXPIRE', KEYS[2], longer)
  redis.call('EXPIRE', KEYS[3], longer)
  redis.call('EXPIRE', KEYS[4], longer)
end

local function answer(outcome, fresh, kinds)
  local note = ARGV[3] .. ' ' .. outcome .. ' ' .. string.format('%.0f', done) .. ' ' .. fresh
  if kinds and kinds ~= meta.kinds then
    redis.call('HSET', KEYS[2], ARGV[2], note, 'kinds', kinds)
    keep()
  else
    redis.call('HSET', KEYS[2], ARGV[2], note)
    if redis.call('TTL', KEYS[2]) < ARGV[1] + 3600 then keep() end
  end
  return { outcome, done, fresh }
end

-- The finish line: the only place where a project becomes DONE, and where that is announced, in one step.
-- An empty project is finished only by the end of its crawl. FAILED is an operator's word and stays.
local function finished(delivered)
  if status == 'DONE' or status == 'CRAWLING' or status == 'FAILED' then return false end
  if done < total or (total == 0 and not meta.crawled) then return false end
  redis.call('HSET', KEYS[1], 'status', 'DONE')
  if delivered then return true end
  local project = string.sub(KEYS[1], 11)
  local now = redis.call('TIME')
  redis.call('XADD', KEYS[5], 'MAXLEN', '~', 100000, '*',
    'id', 'job.completed:' .. project .. ':' .. (meta.epoch or '0'),
    'type', 'job.completed', 'source', 'finishline', 'job', project, 'version', 1,
    'at', now[1] .. '.' .. string.format('%06d', now[2]),
    'data', string.format('{"project_id":"%s","status":"DONE","total":%.0f,"done":%.0f,"errors":%.0f}',
      project, total, done, errors))
  return true
end
