-- count.lua: items of a project are through; count each one once and see whether the project is finished.
-- include: finishline/project
-- ARGV[4] "journal" when the counts are in the journal already, else ""
-- ARGV[5...] one per item: "+" done or "-" failed, then "#number" | "$id" | "*how many" (no identity but the call's)
-- returns also JOURNALED (a project with a journal wants its counts there first) and CORRUPT
if missing then return { 'NOT_FOUND', 0, 0 } end
if not read() then return { 'CORRUPT', 0, 0 } end
local before = earlier()
if before then return before end
if meta.journal and ARGV[4] == '' then return { 'JOURNALED', done, 0 } end

local fresh, failed = 0, 0
local numbers, texts = string.find(meta.kinds, 'b', 1, true), string.find(meta.kinds, 's', 1, true)
local limit = dense()
for i = 5, #ARGV do
  local item = ARGV[i]
  local kind, id, add = string.byte(item, 2), string.sub(item, 3), 0
  if kind == 36 or (kind == 35 and tonumber(id) >= limit) then -- $, or a number that stands alone
    -- It may have become a bit since, if it came when more was expected. A bit beyond the end is 0.
    if kind == 36 or not numbers or redis.call('GETBIT', KEYS[3], id) == 0 then
      add = redis.call('SADD', KEYS[4], id)
      texts = true
    end
  elseif kind == 35 then -- #
    -- It may be a member, if it came when the numbers were few.
    if not texts or redis.call('SISMEMBER', KEYS[4], id) == 0 then
      add = 1 - redis.call('SETBIT', KEYS[3], id, 1)
      numbers = true
    end
  else
    add = tonumber(id)
  end
  fresh = fresh + add
  if string.byte(item, 1) == 45 then failed = failed + add end -- -
end
local kinds = (numbers and 'b' or '') .. (texts and 's' or '')
if fresh == 0 then return answer('DUPLICATE', 0, kinds) end
done = redis.call('HINCRBY', KEYS[1], 'done', fresh)
if failed > 0 then errors = redis.call('HINCRBY', KEYS[1], 'errors', failed) end
return answer(finished() and 'COMPLETED' or 'COUNTED', fresh, kinds)
