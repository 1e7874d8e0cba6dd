package memory

// Check validates the invariants of a snapshot.
func (s *Snapshot) Check() error { return s.check() }
