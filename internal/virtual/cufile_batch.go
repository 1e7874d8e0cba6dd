package virtual

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/cufileapi"
)

// A cufileBatch carries its transfers out in any order.
type cufileBatch struct {
	capacity int
	rng      *rand.Rand
	waiting  int           // transfers that have not begun
	running  int           // transfers that have begun and not ended
	done     []*batchEntry // of which GetStatus has not told
	changed  chan struct{} // see wake
	canceled int           // how many submissions Cancel has seen
	submits  int
	gone     bool
}

// A batchEntry is one transfer of a batch.
type batchEntry struct {
	fileTransfer
	op     *op
	submit int
	event  cufileapi.IOEvents
}

// outstanding counts the transfers that take up room.
func (b *cufileBatch) outstanding() int { return b.waiting + b.running + len(b.done) }

func (l *cufileLib) BatchIOSetUp(nr uint32) (cufileapi.Batch, cufileapi.Result) {
	_, _, r := l.begin(cufileapi.FuncBatchIOSetUp)
	if r != cufileapi.Success {
		return 0, r
	}
	defer l.leave()
	valid := nr > 0 && uintptr(nr) <= l.running.sizes[cufileapi.IOBatchSize]
	l.stats.count(&l.stats.l1.BatchSetUpOps, valid)
	if !valid {
		return 0, cufileapi.InvalidValue
	}
	h := cufileapi.Batch(l.m.handle())
	l.batches[h] = &cufileBatch{capacity: int(nr), rng: rand.New(rand.NewPCG(l.m.seed, uint64(h))), changed: make(chan struct{})}
	return h, cufileapi.Success
}

// BatchIOSubmit takes all transfers or none.
func (l *cufileLib) BatchIOSubmit(h cufileapi.Batch, params []cufileapi.IOParams, flags uint32) cufileapi.Result {
	dev, x, r := l.begin(cufileapi.FuncBatchIOSubmit)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	b := l.batches[h]
	entries, r := l.entries(b, dev, params, flags)
	l.stats.count(&l.stats.l1.BatchSubmitOps, r == cufileapi.Success)
	if r != cufileapi.Success {
		return r
	}
	b.submits++
	l.stats.submitted(entries)
	for _, e := range entries {
		e.plan, e.submit = x, b.submits
		e.op = l.m.hostOp(dev, cufileapi.FuncBatchIOSubmit.Name())
		e.use(1)
	}
	b.waiting += len(entries)
	b.rng.Shuffle(len(entries), func(i, j int) { entries[i], entries[j] = entries[j], entries[i] })
	go l.work(b, entries)
	return cufileapi.Success
}

func (l *cufileLib) entries(b *cufileBatch, dev *device, params []cufileapi.IOParams, flags uint32) ([]*batchEntry, cufileapi.Result) {
	if flags != 0 {
		return nil, cufileapi.InvalidValue
	}
	if b == nil || len(params) == 0 || len(params) > b.capacity-b.outstanding() {
		return nil, cufileapi.InternalBatchSubmitError
	}
	var entries []*batchEntry
	for _, p := range params {
		if p.Mode != cufileapi.BatchMode || p.Opcode != cufileapi.OpRead && p.Opcode != cufileapi.OpWrite {
			return nil, cufileapi.InternalBatchSubmitError
		}
		e := &batchEntry{event: cufileapi.IOEvents{Cookie: p.Cookie}, fileTransfer: fileTransfer{base: p.DevPtrBase, size: uint64(p.Size),
			fileOffset: p.FileOffset, devOffset: p.DevOffset, write: p.Opcode == cufileapi.OpWrite}}
		r := l.prepare(cufileapi.FuncBatchIOSubmit, dev, p.Handle, &e.fileTransfer)
		if r == cufileapi.Success {
			r = l.check(&e.fileTransfer)
		}
		if r != cufileapi.Success {
			return nil, cufileapi.InternalBatchSubmitError
		}
		entries = append(entries, e)
	}
	return entries, cufileapi.Success
}

// work carries out what was submitted at once.
func (l *cufileLib) work(b *cufileBatch, entries []*batchEntry) {
	for _, e := range entries {
		runtime.Gosched()
		l.m.mu.Lock()
		for e.plan.hang && e.submit > b.canceled {
			changed := b.changed
			l.m.mu.Unlock()
			forever(changed)
			l.m.mu.Lock()
		}
		b.waiting--
		b.running++
		canceled := e.submit <= b.canceled
		l.m.mu.Unlock()
		e.event.Status = cufileapi.Canceled
		if !canceled {
			n, err := l.move(e.op, &e.fileTransfer)
			e.event.Status, e.event.Ret = outcome(n, err)
		}
		l.m.mu.Lock()
		b.running--
		e.use(-1)
		b.done = append(b.done, e)
		if b.gone {
			l.reap(b, len(b.done))
		}
		b.wake()
		l.m.mu.Unlock()
	}
}

// wake lets those look again who wait for a change. m.mu is held.
func (b *cufileBatch) wake() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// outcome is what an event says.
func outcome(n int64, err error) (cufileapi.Status, uintptr) {
	var code cufileapi.Result
	var errno syscall.Errno
	switch {
	case err == nil:
		return cufileapi.Complete, uintptr(n)
	case errors.As(err, &code):
		n = -int64(code.Code())
	case errors.As(err, &errno):
		n = -int64(errno)
	}
	return cufileapi.Failed, uintptr(n)
}

// reap takes the first n ended transfers, which the host knows of from now on. m.mu
// is held.
func (l *cufileLib) reap(b *cufileBatch, n int) []*batchEntry {
	told := b.done[:n:n]
	b.done = b.done[n:]
	for _, e := range told {
		l.m.hostDone(e.op)
		l.stats.completed(e)
	}
	return told
}

func (l *cufileLib) BatchIOGetStatus(h cufileapi.Batch, minNr uint32, events []cufileapi.IOEvents, timeout *cufileapi.Timespec) (uint32, cufileapi.Result) {
	_, r := l.enterOpen(cufileapi.FuncBatchIOGetStatus)
	if r != cufileapi.Success {
		return 0, r
	}
	defer l.leave()
	b := l.batches[h]
	switch {
	case b == nil:
		return 0, cufileapi.InternalBatchStatusError
	case int(minNr) > len(events) || int(minNr) > b.outstanding(): // it would wait for ever
		return 0, cufileapi.InvalidValue
	}
	var late <-chan time.Time
	if timeout != nil {
		late = time.After(time.Duration(timeout.Sec)*time.Second + time.Duration(timeout.Nsec))
	}
	for over := false; len(b.done) < int(minNr) && !over; {
		changed := b.changed
		l.leave()
		select {
		case <-changed:
		case <-late:
			over = true
		}
		l.m.mu.Lock()
	}
	told := l.reap(b, min(len(events), len(b.done)))
	for i, e := range told {
		events[i] = e.event
	}
	return uint32(len(told)), cufileapi.Success
}

// BatchIOCancel keeps from beginning what has not begun.
func (l *cufileLib) BatchIOCancel(h cufileapi.Batch) cufileapi.Result {
	_, r := l.enterOpen(cufileapi.FuncBatchIOCancel)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	b := l.batches[h]
	l.stats.count(&l.stats.l1.BatchCancelOps, b != nil)
	if b == nil {
		return cufileapi.InvalidValue
	}
	b.canceled = b.submits
	b.wake()
	return cufileapi.Success
}

func (l *cufileLib) BatchIODestroy(h cufileapi.Batch) {
	_, r := l.enterOpen(cufileapi.FuncBatchIODestroy)
	if r != cufileapi.Success {
		return
	}
	defer l.leave()
	l.stats.count(&l.stats.l1.BatchDestroyOps, l.batches[h] != nil)
	if l.batches[h] == nil {
		l.report("cuFileBatchIODestroy of %#x, which is no batch", uintptr(h))
	}
	l.forgetBatch(cufileapi.FuncBatchIODestroy, h)
}

// forgetBatch takes a batch away. m.mu is held.
func (l *cufileLib) forgetBatch(by cufileapi.Func, h cufileapi.Batch) {
	b := l.batches[h]
	if b == nil {
		return
	}
	if n := b.waiting + b.running; n > 0 {
		l.report("%s gave up a batch while %d of its transfers have not ended: wait for them first", by.Name(), n)
	}
	b.gone = true
	l.reap(b, len(b.done))
	delete(l.batches, h)
}
