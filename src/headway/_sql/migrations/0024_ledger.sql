-- PostgreSQL looks every row of these tables up by its foreign key: more than a third of what recording an item cost it, and
-- half of registering one. All who write them have the job's row, or a block of it, and have seen the item in the same
-- transaction; all who delete items delete these first (Ledger._delete, Job.drop). See docs/decisions/0005.
ALTER TABLE progress DROP CONSTRAINT progress_job_idx_fkey; -- postgresql
ALTER TABLE results DROP CONSTRAINT results_job_idx_fkey; -- postgresql
ALTER TABLE printed DROP CONSTRAINT printed_job_idx_fkey; -- postgresql
ALTER TABLE input_products DROP CONSTRAINT input_products_job_fkey; -- postgresql
