-- change.lua: change the total, the status or the end of the crawl of a project.
-- include: finishline/project
-- ARGV[4] version in the SQL record, or "" without one; a change that is not newer is ignored
-- ARGV[5] total, or "" to keep it   ARGV[6] status, or "" to keep it
-- ARGV[7] "1" the crawl has ended, "0" it continues, "" to keep it
-- ARGV[8] epoch in the SQL record, or "" without one
-- returns UPDATED | COMPLETED | LATE (DONE already, unchanged) | NO_TOTAL (updated; items are counted and the total is
--         0, so it cannot complete) | RECORDED (SQL has total and status and must be changed first)
--         | REMADE (deleted and created again since SQL was changed; unchanged) | NOT_FOUND | CORRUPT
if missing then return { 'NOT_FOUND', 0, 0 } end
if not read() then return { 'CORRUPT', 0, 0 } end
if remade(ARGV[8]) then return { 'REMADE', done, 0 } end
local before = earlier()
if before then return before end
if ARGV[4] == '' and meta.version > 0 then return { 'RECORDED', done, 0 } end
if status == 'DONE' then return answer('LATE', 0) end
if ARGV[4] ~= '' then
  if tonumber(ARGV[4]) <= meta.version then return answer('UPDATED', 0) end
  redis.call('HSET', KEYS[2], 'version', ARGV[4])
end
if ARGV[5] ~= '' then total = tonumber(ARGV[5]) end
if ARGV[6] ~= '' then status = ARGV[6] end
if ARGV[7] == '1' then
  meta.crawled = '1'
  redis.call('HSET', KEYS[2], 'crawled', 1)
elseif ARGV[7] == '0' then
  meta.crawled = false
  redis.call('HDEL', KEYS[2], 'crawled')
end
redis.call('HSET', KEYS[1], 'total', string.format('%.0f', total), 'status', status)
if finished() then return answer('COMPLETED', 0) end
return answer(meta.crawled and total == 0 and done > 0 and 'NO_TOTAL' or 'UPDATED', 0)
