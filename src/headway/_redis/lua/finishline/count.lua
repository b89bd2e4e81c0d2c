-- count.lua: count items of a project, each one once, and complete the project with the last one.
-- include: finishline/project
-- ARGV[4] epoch of the project whose journal has the counts, "" without a journal
-- ARGV[5] version of the SQL record when the journal was written, "" without a journal
-- ARGV[6...] one per item: "+" done or "-" failed, then "#number" | "$id" | "*count" (identified by the call only)
-- returns also JOURNALED (the project has a journal, which must be written first), REMADE (deleted and created again since
--         the journal was written), BEHIND (SQL has a newer total or status; change it here first, or the project would
--         complete by the old one) and CORRUPT
if missing then return { 'NOT_FOUND', 0, 0 } end
if not read() then return { 'CORRUPT', 0, 0 } end
if remade(ARGV[4]) then return { 'REMADE', done, 0 } end
local before = earlier()
if before then return before end
if meta.journal and ARGV[4] == '' then return { 'JOURNALED', done, 0 } end
if ARGV[5] ~= '' and status ~= 'DONE' and tonumber(ARGV[5]) > meta.version then return { 'BEHIND', done, 0 } end

local added = { [43] = 0, [45] = 0 } -- + and -
local members = { [43] = {}, [45] = {} }
local numbers, texts = string.find(meta.kinds, 'b', 1, true), string.find(meta.kinds, 's', 1, true)
local limit = dense()
local bits -- length of the bitmap, read on first use
for i = 6, #ARGV do
  local item = ARGV[i]
  local sign, kind = string.byte(item, 1, 2)
  local id = string.sub(item, 3)
  if kind == 36 then -- $
    members[sign][#members[sign] + 1] = id
  elseif kind == 35 and tonumber(id) >= limit then -- # beyond the dense range
    -- It may be a bit nevertheless, if it was counted when the total was higher.
    if not bits then bits = numbers and 8 * redis.call('STRLEN', KEYS[3]) or 0 end
    if tonumber(id) >= bits or redis.call('GETBIT', KEYS[3], id) == 0 then
      members[sign][#members[sign] + 1] = id
    end
  elseif kind == 35 then -- #
    -- It may be a member of the set, if it was counted when the total was lower.
    if not texts or redis.call('SISMEMBER', KEYS[4], id) == 0 then
      added[sign] = added[sign] + 1 - redis.call('SETBIT', KEYS[3], id, 1)
      numbers = true
    end
  else
    added[sign] = added[sign] + tonumber(id)
  end
end
for sign, ids in pairs(members) do
  for first = 1, #ids, 1000 do
    added[sign] = added[sign] + redis.call('SADD', KEYS[4], unpack(ids, first, math.min(first + 999, #ids)))
    texts = true
  end
end
local fresh, failed = added[43] + added[45], added[45]
local kinds = (numbers and 'b' or '') .. (texts and 's' or '')
if fresh == 0 then return answer('DUPLICATE', 0, kinds) end
done = redis.call('HINCRBY', KEYS[1], 'done', fresh)
if failed > 0 then errors = redis.call('HINCRBY', KEYS[1], 'errors', failed) end
return answer(finished() and 'COMPLETED' or 'COUNTED', fresh, kinds)
