-- What format 1 made in PostgreSQL: a buffer, and the key of its gradient.
CREATE TABLE buffers (
    namespace text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    record bytea NOT NULL,
    seq bigint NOT NULL,
    expires double precision,
    due double precision
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='1000');
CREATE TABLE chunks (
    blob bigint NOT NULL,
    number integer NOT NULL,
    data bytea NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='1000', toast.autovacuum_vacuum_scale_factor='0.02', toast.autovacuum_vacuum_threshold='1000');
ALTER TABLE ONLY chunks ALTER COLUMN data SET STORAGE EXTERNAL;
CREATE TABLE deltas (
    value bigint NOT NULL,
    seq bigint NOT NULL,
    weight double precision NOT NULL,
    overwrite boolean NOT NULL,
    dtype text NOT NULL,
    shape text NOT NULL,
    bytes bigint NOT NULL,
    blob bigint,
    data bytea
)
WITH (autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='1000');
ALTER TABLE ONLY deltas ALTER COLUMN data SET STORAGE EXTERNAL;
CREATE SEQUENCE ids
    START WITH 1
    INCREMENT BY 1000
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
CREATE TABLE keys (
    digest bytea NOT NULL,
    namespace text NOT NULL,
    at double precision NOT NULL,
    outcome bytea NOT NULL
)
PARTITION BY RANGE (at);
CREATE TABLE keys_1795672800 (
    digest bytea NOT NULL,
    namespace text NOT NULL,
    at double precision NOT NULL,
    outcome bytea NOT NULL
);
CREATE TABLE keys_1795694400 (
    digest bytea NOT NULL,
    namespace text NOT NULL,
    at double precision NOT NULL,
    outcome bytea NOT NULL
);
CREATE TABLE loose (
    blob bigint NOT NULL,
    due double precision NOT NULL
);
CREATE TABLE meta (
    version integer NOT NULL
);
ALTER TABLE ONLY keys ATTACH PARTITION keys_1795672800 FOR VALUES FROM ('1795672800') TO ('1795694400');
ALTER TABLE ONLY keys ATTACH PARTITION keys_1795694400 FOR VALUES FROM ('1795694400') TO ('1795716000');
INSERT INTO buffers VALUES ('', 'weight', '\x5b7b227368617065223a5b335d2c226474797065223a22666c6f61743332222c226e6f6e66696e697465223a22616c6c6f77222c2271756f72756d223a322c226b656570223a312c2274746c5f7365636f6e6473223a6e756c6c7d2c322c313739353637393337392e3436333839382c313739353637393337392e3437323939342c302c312c312c312e302c332c5b5d5d', 1, NULL, NULL);
INSERT INTO deltas VALUES (3, 1, 1, false, 'float32', '[3]', 12, NULL, '\x0000803f0000004000004040');
INSERT INTO keys_1795672800 VALUES ('\x5d0b15f37bf87eaf7a8475ee55a65fed', '', 1795679379.463898, '\x');
INSERT INTO keys_1795672800 VALUES ('\xd2878b74e4f149fc6cfb5086b684da71', '', 1795679379.472994, '\x303030303030303030303030303030307801458d310e80201004ffb2f5c580e57dc550103cc544c1086861f8bb5818bb9dcd6676b871c932fb0cbe11ec26e0af20947db45946703e8a10dc1ad34b935d5343d9a3f3604538e5484b0c60dd46b184266be9f3ea4ed54aff4f5f6930e601adbd27e9');
INSERT INTO keys_1795672800 VALUES ('\x73ed85e0ab400cc128b988650a7e4ff4', '', 1795679379.472994, '\x');
INSERT INTO meta VALUES (1);
SELECT pg_catalog.setval('ids', 1, true);
ALTER TABLE ONLY buffers
    ADD CONSTRAINT buffers_pkey PRIMARY KEY (namespace, name);
ALTER TABLE ONLY chunks
    ADD CONSTRAINT chunks_pkey PRIMARY KEY (blob, number);
ALTER TABLE ONLY deltas
    ADD CONSTRAINT deltas_pkey PRIMARY KEY (value, seq);
ALTER TABLE ONLY keys
    ADD CONSTRAINT keys_pkey PRIMARY KEY (digest, at);
ALTER TABLE ONLY keys_1795672800
    ADD CONSTRAINT keys_1795672800_pkey PRIMARY KEY (digest, at);
ALTER TABLE ONLY keys_1795694400
    ADD CONSTRAINT keys_1795694400_pkey PRIMARY KEY (digest, at);
ALTER TABLE ONLY loose
    ADD CONSTRAINT loose_pkey PRIMARY KEY (blob);
CREATE INDEX buffers_due ON buffers USING btree (due) WHERE (due IS NOT NULL);
CREATE INDEX buffers_expires ON buffers USING btree (expires) WHERE (expires IS NOT NULL);
CREATE INDEX loose_due ON loose USING btree (due);
ALTER INDEX keys_pkey ATTACH PARTITION keys_1795672800_pkey;
ALTER INDEX keys_pkey ATTACH PARTITION keys_1795694400_pkey;
