-- lease/acquire.lua: give a lease to one owner, unless somebody else has it.
-- KEYS[1] the lease                  string  "token owner"
-- KEYS[2] headway:lease:token        string  counter: every change of hands gets a number of its own
-- ARGV[1] owner   ARGV[2] milliseconds   ARGV[3] a value of KEYS[1] whose owner is known to be dead, or ""
-- returns {"ACQUIRED", token} | {"HELD", value}
-- The first write is PERSIST, which a server at its maxmemory does not refuse: a lease is small and soon gone.
redis.call('PERSIST', KEYS[2])
local held = redis.call('GET', KEYS[1])
if held then
  local token, owner = string.match(held, '^(%d+) (.*)$')
  if owner == ARGV[1] then
    -- The same call again: its first answer was lost.
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return {'ACQUIRED', tonumber(token)}
  end
  if held ~= ARGV[3] then
    -- Redis counts to a moment of its clock too. More left than its whole time: the clock was set back since.
    local read, known = pcall(cjson.decode, owner or '')
    local whole = read and type(known) == 'table' and tonumber(known['seconds'])
    if whole and redis.call('PTTL', KEYS[1]) > (whole + 1) * 1000 then
      redis.call('PEXPIRE', KEYS[1], math.max(1, math.floor(whole * 1000)))
    end
    return {'HELD', held}
  end
end
local token = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], token .. ' ' .. ARGV[1], 'PX', ARGV[2])
return {'ACQUIRED', token}
