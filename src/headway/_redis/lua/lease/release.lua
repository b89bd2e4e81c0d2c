-- lease/release.lua: release a lease if this owner has it.
-- KEYS[1] the lease   string  "token owner"
-- ARGV[1] the value that it must have
-- returns "RELEASED" | "LOST"
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  return 'RELEASED'
end
return 'LOST'
