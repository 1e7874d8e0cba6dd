package alloc

// A piece is addresses that were given out.
type piece struct{ addr, bytes uint64 }

// giveAuditor tells the auditor of a piece that came back, now or, where no stream
// could tell when, once the arena has one again.
func (a *Arena) giveAuditor(addr, bytes uint64) {
	if a.stream == nil {
		a.owed = append(a.owed, piece{addr, bytes})
		return
	}
	a.device.cfg.Auditor.Return(a.stream, addr, bytes)
}

// payAuditor tells what the auditor was owed, in the order of the arena's new
// stream.
func (a *Arena) payAuditor() {
	for _, p := range a.owed {
		if a.device.table.segment(p.addr) != nil { // it may have gone back to the driver
			a.giveAuditor(p.addr, p.bytes)
		}
	}
	a.owed = nil
}
