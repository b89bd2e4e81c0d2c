-- events/subscribe.lua: a sink is told everything that waits in the stream from now on, and what waits there already.
-- KEYS[1] smap:events   stream
-- KEYS[2] smap:events:hold   string   while it is there nothing leaves the stream
-- ARGV[1] sink, the name of its group
-- ARGV[2] seconds to hold the stream if the group is made, because it was there before and so the stream was lost; else 0
-- returns OK | EXISTS
-- The first write is PERSIST, which a server at its maxmemory does not refuse: a group is small, and without it nothing
-- would ever leave the stream.
redis.call('PERSIST', KEYS[1])
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if made.err and string.find(made.err, 'BUSYGROUP', 1, true) then return 'EXISTS' end
if not made.err and tonumber(ARGV[2]) > 0 then redis.call('SET', KEYS[2], 1, 'EX', ARGV[2]) end
return made
