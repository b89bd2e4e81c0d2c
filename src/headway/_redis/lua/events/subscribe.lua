-- events/subscribe.lua: a sink is told everything that waits in the stream from now on, and what waits there already.
-- KEYS[1] smap:events   stream
-- ARGV[1] sink, the name of its group
-- returns OK | EXISTS
-- The first write is PERSIST, which a server at its maxmemory does not refuse: a group is small, and without it nothing
-- would ever leave the stream.
redis.call('PERSIST', KEYS[1])
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if made.err and string.find(made.err, 'BUSYGROUP', 1, true) then return 'EXISTS' end
return made
