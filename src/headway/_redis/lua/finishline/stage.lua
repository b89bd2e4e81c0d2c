-- stage.lua: stage identities of a project that is being rebuilt.
-- KEYS[1] smap:proj:{id}:bits:{token}   string
-- KEYS[2] smap:proj:{id}:seen:{token}   set
-- ARGV[1] ttl   ARGV[2] numbers from this one on are members of the set   ARGV[3...] "#number" | "$id"
-- returns the number of identities
-- A server at its maxmemory refuses the first write of a script, but never EXPIRE. Redis had this data before.
redis.call('EXPIRE', KEYS[1], ARGV[1])
local limit = tonumber(ARGV[2])
for i = 3, #ARGV do
  local id = string.sub(ARGV[i], 2)
  if string.byte(ARGV[i], 1) == 35 and tonumber(id) < limit then
    redis.call('SETBIT', KEYS[1], id, 1)
  else
    redis.call('SADD', KEYS[2], id)
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[1])
return #ARGV - 2
