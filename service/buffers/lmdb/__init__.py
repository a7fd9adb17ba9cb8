"""The store on one machine's disk, in LMDB and a file of slots beside it."""
