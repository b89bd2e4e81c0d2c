-- states/mark_deleted.lua: mark a job as deleted.
-- KEYS[1] headway:states:{id}   hash
-- ARGV[1] incarnation, or "" for any
-- returns "MARKED" | "NOT_FOUND" | "GONE" (another incarnation)
local found = redis.call('HGET', KEYS[1], 'incarnation')
if not found then return 'NOT_FOUND' end
if ARGV[1] ~= '' and found ~= ARGV[1] then return 'GONE' end
redis.call('HSET', KEYS[1], 'deleted', '1')
return 'MARKED'
