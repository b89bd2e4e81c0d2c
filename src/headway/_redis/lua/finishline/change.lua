-- change.lua: the total, the status or the end of the crawl of a project.
-- include: finishline/project
-- ARGV[4] version by the SQL record, or "" without one: an older change never replaces a newer one
-- ARGV[5] total, or "" to leave it   ARGV[6] status, or "" to leave it
-- ARGV[7] "1" the crawl has ended, "0" it goes on, "" to leave it
-- ARGV[8] epoch of the project that SQL changed, or "" without a record
-- returns UPDATED | COMPLETED | LATE (it is DONE, nothing changed) | NO_TOTAL (updated; items are through and the total
--         is 0, so it cannot finish yet) | RECORDED (SQL has the total and the status; change them there first)
--         | REMADE (it was deleted and created again since SQL was asked; nothing changed) | NOT_FOUND | CORRUPT
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
