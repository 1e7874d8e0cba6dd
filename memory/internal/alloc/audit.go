package alloc

// A piece is an address range that was allocated.
type piece struct{ addr, bytes uint64 }

// giveAuditor reports a freed piece to the auditor. If the arena has no stream, the
// report is postponed until the arena has one again.
func (a *Arena) giveAuditor(addr, bytes uint64) {
	if a.stream == nil {
		a.owed = append(a.owed, piece{addr, bytes})
		return
	}
	a.device.cfg.Auditor.Return(a.stream, addr, bytes)
}

// payAuditor makes the postponed reports, in the order of the arena's new stream.
func (a *Arena) payAuditor() {
	for _, p := range a.owed {
		if a.device.table.segment(p.addr) != nil { // otherwise the segment was returned to the driver
			a.giveAuditor(p.addr, p.bytes)
		}
	}
	a.owed = nil
}
