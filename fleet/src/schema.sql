-- The board on PostgreSQL. Workers call five functions and nothing else; each call is one transaction. The functions
-- are the state machine of `protocol.rs` again: tests/board.rs compares them on random requests.
CREATE SCHEMA amk_fleet;
SET LOCAL search_path = amk_fleet;

CREATE TABLE terms(version bigint NOT NULL, lease_ms bigint NOT NULL, heartbeat_ms bigint NOT NULL,
  attempts_max bigint NOT NULL);
CREATE TABLE snapshots(hash text PRIMARY KEY, priors text NOT NULL CHECK (octet_length(priors) <= 67108864));
CREATE TABLE jobs(id bigint PRIMARY KEY, key text NOT NULL UNIQUE, needs text NOT NULL, subject text NOT NULL,
  not_card text NOT NULL, spec text NOT NULL, state text NOT NULL DEFAULT 'queued', attempts bigint NOT NULL DEFAULT 0,
  fence bigint, until_ms bigint, hash text, why text CHECK (octet_length(why) <= 65536));
CREATE INDEX jobs_open ON jobs(needs, id) WHERE state IN ('queued', 'leased');
CREATE INDEX jobs_subject ON jobs(subject) WHERE subject <> '';
CREATE TABLE workers(number bigint GENERATED ALWAYS AS IDENTITY, id text PRIMARY KEY CHECK (octet_length(id) <= 512),
  worker text NOT NULL CHECK (octet_length(worker) <= 8192), target text NOT NULL, card text NOT NULL,
  state text NOT NULL, seen_ms bigint NOT NULL);
CREATE TABLE attempts(fence bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, job bigint NOT NULL REFERENCES jobs,
  worker text NOT NULL REFERENCES workers, ask text NOT NULL CHECK (octet_length(ask) <= 64), card text NOT NULL,
  began_ms bigint NOT NULL, ended_ms bigint, how text NOT NULL, UNIQUE (worker, ask));
CREATE INDEX attempts_job ON attempts(job);
CREATE TABLE results(job bigint PRIMARY KEY REFERENCES jobs, fence bigint NOT NULL UNIQUE REFERENCES attempts,
  result text NOT NULL CHECK (octet_length(result) <= 134217728), recorded_ms bigint NOT NULL);

-- The board's clock.
CREATE FUNCTION now_ms() RETURNS bigint LANGUAGE sql VOLATILE
  AS $$ SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint $$;

-- Why a lease is lost; null while it is held.
CREATE FUNCTION late(state text, held bigint, shown bigint) RETURNS text LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN state = 'leased' AND held = shown THEN NULL WHEN state = 'leased' THEN 'taken'
    WHEN state = 'queued' THEN 'free' WHEN state = 'done' THEN 'finished' ELSE 'dead' END $$;

-- 1. Version and terms; with a name also enters a worker, or says that it has ended. The same entry again is accepted.
CREATE FUNCTION register(who text, described text, now_is text)
RETURNS TABLE(version bigint, lease_ms bigint, heartbeat_ms bigint, attempts_max bigint, accepted boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = amk_fleet, pg_temp SET lock_timeout = '5s' AS $$
#variable_conflict use_column
DECLARE ok boolean := true;
BEGIN
  IF now_is = 'active' THEN
    INSERT INTO workers(id, worker, target, card, state, seen_ms)
      VALUES (who, described, described::json->>'target', described::json->>'card', 'active', now_ms())
      ON CONFLICT (id) DO NOTHING;
    SELECT w.worker = described INTO ok FROM workers w WHERE w.id = who;
  ELSIF now_is = 'gone' THEN
    UPDATE workers SET state = 'gone', seen_ms = now_ms() WHERE id = who;
  END IF;
  RETURN QUERY SELECT t.version, t.lease_ms, t.heartbeat_ms, t.attempts_max, ok FROM terms t;
END $$;

-- 2. Leases the next job that a worker can do. A claim that is repeated under its number finds its lease again.
CREATE FUNCTION claim(who text, number text)
RETURNS TABLE(said text, job bigint, lease bigint, spec text, key text, priors text, open bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = amk_fleet, pg_temp SET lock_timeout = '5s' AS $$
#variable_conflict use_column
DECLARE
  w workers; t terms; j jobs; need text; given bigint; clock bigint;
BEGIN
  SELECT * INTO t FROM terms;
  UPDATE workers SET seen_ms = now_ms() WHERE id = who RETURNING * INTO w;
  SELECT jobs.* INTO j FROM attempts a JOIN jobs ON jobs.id = a.job AND jobs.fence = a.fence
    WHERE a.worker = who AND a.ask = number AND a.how = 'running' AND jobs.state = 'leased' FOR UPDATE OF jobs;
  IF FOUND THEN
    UPDATE jobs SET until_ms = now_ms() + t.lease_ms WHERE id = j.id;
    RETURN QUERY SELECT 'leased', j.id, j.fence, j.spec, j.key,
      (SELECT s.priors FROM snapshots s WHERE s.hash = j.spec::json->>'priors'), 0::bigint;
    RETURN;
  END IF;
  IF w.state IS DISTINCT FROM 'active' THEN
    RETURN QUERY SELECT 'drained', NULL::bigint, NULL::bigint, NULL, NULL, NULL, 0::bigint;
    RETURN;
  END IF;
  -- Two workers of one card take turns, so that it does not race one champion twice.
  IF w.card <> '' THEN PERFORM pg_advisory_xact_lock(hashtextextended(w.card, 0)); END IF;
  FOREACH need IN ARRAY CASE WHEN w.target = '' THEN ARRAY[''] ELSE ARRAY[w.target, ''] END LOOP
    LOOP
      clock := now_ms();
      SELECT * INTO j FROM jobs WHERE needs = need AND state IN ('queued', 'leased')
        AND (state = 'queued' OR until_ms <= clock)
        AND (subject = '' OR w.card = '' OR (not_card <> w.card AND NOT EXISTS (
          SELECT 1 FROM jobs o JOIN attempts a ON a.job = o.id WHERE o.subject = jobs.subject AND o.subject <> ''
          AND o.id <> jobs.id AND a.card = w.card AND a.how IN ('running', 'done'))))
        ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED;
      EXIT WHEN NOT FOUND;
      IF j.state = 'leased' THEN
        UPDATE attempts SET ended_ms = j.until_ms, how = 'expired' WHERE fence = j.fence;
      END IF;
      IF j.attempts >= t.attempts_max THEN
        UPDATE jobs SET state = 'dead', fence = NULL, until_ms = NULL, hash = NULL,
          why = coalesce(why || '; ', '') || 'the last lease ran out' WHERE id = j.id;
        CONTINUE;
      END IF;
      clock := now_ms();
      INSERT INTO attempts(job, worker, ask, card, began_ms, how)
        VALUES (j.id, who, number, w.card, clock, 'running') RETURNING fence INTO given;
      UPDATE jobs SET state = 'leased', fence = given, until_ms = clock + t.lease_ms, attempts = attempts + 1
        WHERE id = j.id;
      RETURN QUERY SELECT 'leased', j.id, given, j.spec, j.key,
        (SELECT s.priors FROM snapshots s WHERE s.hash = j.spec::json->>'priors'), 0::bigint;
      RETURN;
    END LOOP;
  END LOOP;
  RETURN QUERY SELECT 'nothing', NULL::bigint, NULL::bigint, NULL, NULL, NULL,
    (SELECT count(*) FROM jobs WHERE needs IN ('', w.target) AND state IN ('queued', 'leased'));
END $$;

-- 3. Renews a lease.
CREATE FUNCTION beat(of_job bigint, lease bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = amk_fleet, pg_temp SET lock_timeout = '5s' AS $$
DECLARE j jobs; why text;
BEGIN
  SELECT * INTO j FROM jobs WHERE id = of_job FOR UPDATE;
  IF NOT FOUND THEN RETURN 'missing'; END IF;
  why := late(j.state, j.fence, lease);
  IF why IS NOT NULL THEN RETURN why; END IF;
  UPDATE jobs SET until_ms = now_ms() + (SELECT lease_ms FROM terms) WHERE id = of_job;
  UPDATE workers SET seen_ms = now_ms() WHERE id = (SELECT a.worker FROM attempts a WHERE a.fence = lease);
  RETURN 'ok';
END $$;

-- 4. Records a result and closes its job. The same result again is accepted and changes nothing.
CREATE FUNCTION finish(of_job bigint, lease bigint, result_hash text, result text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = amk_fleet, pg_temp SET lock_timeout = '5s' AS $$
DECLARE j jobs; why text;
BEGIN
  SELECT * INTO j FROM jobs WHERE id = of_job FOR UPDATE;
  IF NOT FOUND THEN RETURN 'missing'; END IF;
  IF j.state = 'done' AND j.fence = lease THEN
    RETURN CASE WHEN j.hash = result_hash THEN 'ok' ELSE 'differs' END;
  END IF;
  why := late(j.state, j.fence, lease);
  IF why IS NOT NULL THEN RETURN why; END IF;
  INSERT INTO results VALUES (of_job, lease, result, now_ms());
  UPDATE attempts SET ended_ms = now_ms(), how = 'done' WHERE fence = lease;
  UPDATE jobs SET state = 'done', until_ms = NULL, hash = result_hash WHERE id = of_job;
  RETURN 'ok';
END $$;

-- 5. Frees a job: without a reason it was given back, and the attempt does not count; else it has failed.
CREATE FUNCTION release(of_job bigint, lease bigint, reason text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = amk_fleet, pg_temp SET lock_timeout = '5s' AS $$
DECLARE j jobs; lost text; most bigint;
BEGIN
  SELECT * INTO j FROM jobs WHERE id = of_job FOR UPDATE;
  IF NOT FOUND THEN RETURN 'missing'; END IF;
  lost := late(j.state, j.fence, lease);
  IF lost IS NOT NULL THEN RETURN lost; END IF;
  SELECT attempts_max INTO most FROM terms;
  UPDATE jobs SET fence = NULL, until_ms = NULL, why = coalesce(reason, why),
    attempts = attempts - CASE WHEN reason IS NULL THEN 1 ELSE 0 END,
    state = CASE WHEN reason IS NOT NULL AND attempts >= most THEN 'dead' ELSE 'queued' END WHERE id = of_job;
  UPDATE attempts SET ended_ms = now_ms(), how = CASE WHEN reason IS NULL THEN 'given_back' ELSE 'failed' END
    WHERE fence = lease;
  PERFORM pg_notify('amk_fleet', '');
  RETURN 'ok';
END $$;

REVOKE ALL ON ALL TABLES IN SCHEMA amk_fleet FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA amk_fleet FROM PUBLIC;
