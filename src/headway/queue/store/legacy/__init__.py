"""An application's own task table whose rows follow their tasks.

The table is in the queue's own database. Triggers on ``tasks`` update the row inside the transaction that changes the task,
so that the two cannot disagree, whichever process or statement made the change. The same triggers count both kinds of task
for the user's limit. `headway.queue.migration` moves tasks between the two tables.
"""
