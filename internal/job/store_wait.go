package job

// Limits of the waiting calls of one rank. A process has one call for each
// waiting goroutine, and a call may have one key for each rank of a large world.
const (
	MaxWaits    = 4096
	MaxWaitKeys = 1 << 16
	// waitBytes is the approximate cost of one key of a waiting call, in addition to the key's bytes.
	waitBytes = 256
)

// A load counts the waiting calls of a rank, and their keys.
type load struct{ calls, keys int }

// addWaiter records a waiting call and charges it to the store, or returns why it cannot wait.
func (e *engine) addWaiter(w *waiter) byte {
	l := e.loads[w.rank]
	switch {
	case e.waiting[w.ticket] != nil:
		return statusBad // duplicate number
	case w.op == OpFinish: // Shutdown has no limit
	case l.calls >= MaxWaits || l.keys+len(w.keys) > MaxWaitKeys:
		return StatusTooMany
	case e.total()+w.bytes > MaxStoreBytes:
		return StatusFull
	}
	e.bytes += w.bytes
	e.loads[w.rank] = load{l.calls + 1, l.keys + len(w.keys)}
	e.waiting[w.ticket] = w
	return StatusOK
}

// exit reverses enter.
func (e *engine) exit(w *waiter) {
	delete(e.waiting, w.ticket)
	e.bytes -= w.bytes
	l := e.loads[w.rank]
	l = load{l.calls - 1, l.keys - len(w.keys)}
	if e.loads[w.rank] = l; l == (load{}) {
		delete(e.loads, w.rank)
	}
}

// wait replies when all keys of the call have values.
func (e *engine) wait(t ticket, c Call, reply func(Call)) {
	w := &waiter{ticket: t, op: c.Op, reply: reply}
	seen := make(map[string]bool, min(len(c.Fields), MaxWaitKeys+1))
	for _, f := range c.Fields {
		if seen[string(f)] {
			continue
		}
		if len(w.keys) == MaxWaitKeys {
			reply(Call{Op: StatusTooMany})
			return
		}
		k := string(f)
		seen[k] = true
		w.keys = append(w.keys, k)
		w.bytes += len(k) + waitBytes
		if _, ok := e.values[k]; !ok {
			w.absent++
		}
	}
	if w.absent == 0 {
		e.answer(w)
		return
	}
	if status := e.addWaiter(w); status != StatusOK {
		reply(Call{Op: status})
		return
	}
	for _, k := range w.keys {
		if e.byKey[k] == nil {
			e.byKey[k] = map[*waiter]bool{}
		}
		e.byKey[k][w] = true
	}
}

// answer replies to a call whose keys all have values. The values of opGetAll follow
// the first occurrence of each key. Replies to many calls share the memory of long values.
func (e *engine) answer(w *waiter) {
	r := Call{Op: StatusOK}
	if w.op != OpWait {
		total := 0
		for _, k := range w.keys {
			v := e.values[k]
			total += len(v.b) + fieldBytes
			r.Fields, r.holds = append(r.Fields, v.b), append(r.holds, v.buf)
		}
		if total > MaxCallBytes {
			r = Call{Op: StatusTooLarge}
		}
	}
	w.reply(r)
}

// wake records that a key has a value, and answers calls that were waiting only for this key.
func (e *engine) wake(key string) {
	for w := range e.byKey[key] {
		if w.absent--; w.absent == 0 {
			e.forget(w)
			e.answer(w)
		}
	}
}

// forget ends the wait of a call.
func (e *engine) forget(w *waiter) {
	e.exit(w)
	for _, k := range w.keys {
		delete(e.byKey[k], w)
		if len(e.byKey[k]) == 0 {
			delete(e.byKey, k)
		}
	}
}
