-- create.lua: create a project unless it exists.
-- include: finishline/project
-- ARGV[4] epoch, part of its event's id   ARGV[5] total
-- returns CREATED | EXISTS
if not missing then return { 'EXISTS', 0, 0 } end
-- Companions may be left of an earlier project of this name whose hash was deleted by hand.
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
redis.call('HSET', KEYS[1], 'status', 'INITIALIZING', 'total', ARGV[5], 'done', 0, 'errors', 0)
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], 'epoch', ARGV[4], 'version', 0)
keep()
return { 'CREATED', 0, 0 }
