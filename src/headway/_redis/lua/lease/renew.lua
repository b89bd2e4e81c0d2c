-- lease/renew.lua: renew a lease if this owner has it.
-- KEYS[1] the lease   string  "token owner"
-- ARGV[1] the value that it must have   ARGV[2] milliseconds
-- returns "RENEWED" | "LOST"
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return 'RENEWED'
end
return 'LOST'
