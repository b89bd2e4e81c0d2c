-- stage.lua: put identities aside for a project that is being rebuilt.
-- KEYS[1] smap:proj:{id}:bits:{token}   string
-- KEYS[2] smap:proj:{id}:seen:{token}   set
-- ARGV[1] ttl   ARGV[2...] "#number" | "$id"
-- returns how many
for i = 2, #ARGV do
  local id = string.sub(ARGV[i], 2)
  if string.byte(ARGV[i], 1) == 35 then
    redis.call('SETBIT', KEYS[1], id, 1)
  else
    redis.call('SADD', KEYS[2], id)
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[1])
return #ARGV - 1
