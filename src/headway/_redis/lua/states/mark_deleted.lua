-- states/mark_deleted.lua: leave a tombstone on a job.
-- KEYS[1] headway:states:{id}   hash
-- returns "MARKED" | "NOT_FOUND"
if redis.call('EXISTS', KEYS[1]) == 0 then return 'NOT_FOUND' end
redis.call('HSET', KEYS[1], 'deleted', '1')
return 'MARKED'
