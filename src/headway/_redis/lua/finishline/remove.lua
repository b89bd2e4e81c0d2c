-- remove.lua: delete a project, unless its epoch is another one or the lease is lost.
-- KEYS[1] smap:proj:{id}   KEYS[2] ...:meta   KEYS[3] ...:bits   KEYS[4] ...:seen
-- KEYS[5] smap:proj:{id}:rebuild   string   the lease, "token owner"
-- ARGV[1] value that the lease must have, or "" without a record, which needs no lease
-- ARGV[2] its epoch, or "" if it has none
-- returns REMOVED | NOT_FOUND | STALE
if ARGV[1] ~= '' and redis.call('GET', KEYS[5]) ~= ARGV[1] then return 'STALE' end
if ARGV[2] ~= '' and redis.call('HGET', KEYS[2], 'epoch') ~= ARGV[2] then return 'NOT_FOUND' end
return redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4]) > 0 and 'REMOVED' or 'NOT_FOUND'
