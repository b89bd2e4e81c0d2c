-- remove.lua: forget a project, unless the lease it is removed under went to somebody else.
-- KEYS[1] smap:proj:{id}   KEYS[2] ...:meta   KEYS[3] ...:bits   KEYS[4] ...:seen
-- KEYS[5] smap:proj:{id}:rebuild   string   the lease, "token owner"
-- ARGV[1] what the lease must say
-- returns REMOVED | NOT_FOUND | STALE
if redis.call('GET', KEYS[5]) ~= ARGV[1] then return 'STALE' end
return redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4]) > 0 and 'REMOVED' or 'NOT_FOUND'
