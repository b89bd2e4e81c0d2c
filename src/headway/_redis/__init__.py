"""The only package that talks to Redis. All others go through it.

    keys         every key Headway writes
    address      parsing and display of addresses
    connections  connections that never return the reply to another request
    clients      `connect`: every time limit explicit, no hidden retries
    errors       `translate`: redis-py's exceptions as Headway's
    preflight    requirements for a server
    scripts      ``lua/OWNER/NAME.lua``

A server is standalone, or a master behind Sentinel that its address follows. Redis Cluster has no database 1.
"""

from headway._redis.address import DATABASES as DATABASES
from headway._redis.address import Role as Role
from headway._redis.address import database_of as database_of
from headway._redis.address import read_address as read_address
from headway._redis.address import shown_address as shown_address
from headway._redis.clients import TIMEOUT as TIMEOUT
from headway._redis.clients import client_address as client_address
from headway._redis.clients import connect as connect
from headway._redis.clients import connect_async as connect_async
from headway._redis.connections import Argument as Argument
from headway._redis.connections import borrow as borrow
from headway._redis.connections import make_ready as make_ready
from headway._redis.errors import failures as failures
from headway._redis.errors import is_transient as is_transient
from headway._redis.errors import translate as translate
from headway._redis.keys import *  # noqa: F403  # every key is exported
from headway._redis.preflight import EvictionWatch as EvictionWatch
from headway._redis.preflight import ServerFacts as ServerFacts
from headway._redis.preflight import facts as facts
from headway._redis.preflight import preflight as preflight
from headway._redis.scripts import Reply as Reply
from headway._redis.scripts import Script as Script
from headway._redis.scripts import script as script
