package cufile

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/virtual/fault"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// A batch performs its transfers in random order.
type batch struct {
	capacity int
	rng      *rand.Rand
	waiting  int           // transfers not started
	running  int           // transfers in progress
	done     []*entry      // not yet returned by GetStatus
	changed  chan struct{} // see wake
	canceled int           // number of submissions at the last Cancel
	submits  int
	gone     bool
}

// A entry is one transfer of a batch.
type entry struct {
	transfer
	op     *machine.Op
	submit int
	event  cufileapi.IOEvents
}

// outstanding counts the transfers that occupy capacity.
func (b *batch) outstanding() int { return b.waiting + b.running + len(b.done) }

func (l *lib) BatchIOSetUp(nr uint32) (cufileapi.Batch, cufileapi.Result) {
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
	h := cufileapi.Batch(l.m.Handle())
	l.batches[h] = &batch{capacity: int(nr), rng: rand.New(rand.NewPCG(l.m.Seed(), uint64(h))), changed: make(chan struct{})}
	return h, cufileapi.Success
}

// BatchIOSubmit accepts all transfers or none.
func (l *lib) BatchIOSubmit(h cufileapi.Batch, params []cufileapi.IOParams, flags uint32) cufileapi.Result {
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
		e.op = l.m.HostOp(dev, cufileapi.FuncBatchIOSubmit.Name())
		e.use(1)
	}
	b.waiting += len(entries)
	b.rng.Shuffle(len(entries), func(i, j int) { entries[i], entries[j] = entries[j], entries[i] })
	go l.work(b, entries)
	return cufileapi.Success
}

func (l *lib) entries(b *batch, dev *machine.Device, params []cufileapi.IOParams, flags uint32) ([]*entry, cufileapi.Result) {
	if flags != 0 {
		return nil, cufileapi.InvalidValue
	}
	if b == nil || len(params) == 0 || len(params) > b.capacity-b.outstanding() {
		return nil, cufileapi.InternalBatchSubmitError
	}
	var entries []*entry
	for _, p := range params {
		if p.Mode != cufileapi.BatchMode || p.Opcode != cufileapi.OpRead && p.Opcode != cufileapi.OpWrite {
			return nil, cufileapi.InternalBatchSubmitError
		}
		e := &entry{event: cufileapi.IOEvents{Cookie: p.Cookie}, transfer: transfer{base: p.DevPtrBase, size: uint64(p.Size),
			fileOffset: p.FileOffset, devOffset: p.DevOffset, write: p.Opcode == cufileapi.OpWrite}}
		r := l.prepare(cufileapi.FuncBatchIOSubmit, dev, p.Handle, &e.transfer)
		if r == cufileapi.Success {
			r = l.check(&e.transfer)
		}
		if r != cufileapi.Success {
			return nil, cufileapi.InternalBatchSubmitError
		}
		entries = append(entries, e)
	}
	return entries, cufileapi.Success
}

// work performs the transfers of one submission.
func (l *lib) work(b *batch, entries []*entry) {
	for _, e := range entries {
		runtime.Gosched()
		l.m.Lock()
		for e.plan.Hang && e.submit > b.canceled {
			changed := b.changed
			l.m.Unlock()
			fault.Forever(changed)
			l.m.Lock()
		}
		b.waiting--
		b.running++
		canceled := e.submit <= b.canceled
		l.m.Unlock()
		e.event.Status = cufileapi.Canceled
		if !canceled {
			n, err := l.move(e.op, &e.transfer)
			e.event.Status, e.event.Ret = outcome(n, err)
		}
		l.m.Lock()
		b.running--
		e.use(-1)
		b.done = append(b.done, e)
		if b.gone {
			l.reap(b, len(b.done))
		}
		b.wake()
		l.m.Unlock()
	}
}

// wake wakes goroutines that wait for a change. The machine is locked.
func (b *batch) wake() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// outcome converts a result to the fields of an event.
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

// reap removes the first n completed transfers, which the host knows from now on.
// The machine is locked.
func (l *lib) reap(b *batch, n int) []*entry {
	told := b.done[:n:n]
	b.done = b.done[n:]
	for _, e := range told {
		l.m.HostDone(e.op)
		l.stats.completed(e)
	}
	return told
}

func (l *lib) BatchIOGetStatus(h cufileapi.Batch, minNr uint32, events []cufileapi.IOEvents, timeout *cufileapi.Timespec) (uint32, cufileapi.Result) {
	_, r := l.enterOpen(cufileapi.FuncBatchIOGetStatus)
	if r != cufileapi.Success {
		return 0, r
	}
	defer l.leave()
	b := l.batches[h]
	switch {
	case b == nil:
		return 0, cufileapi.InternalBatchStatusError
	case int(minNr) > len(events) || int(minNr) > b.outstanding(): // it would wait forever
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
		l.m.Lock()
	}
	told := l.reap(b, min(len(events), len(b.done)))
	for i, e := range told {
		events[i] = e.event
	}
	return uint32(len(told)), cufileapi.Success
}

// BatchIOCancel cancels the transfers that have not started.
func (l *lib) BatchIOCancel(h cufileapi.Batch) cufileapi.Result {
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

func (l *lib) BatchIODestroy(h cufileapi.Batch) {
	_, r := l.enterOpen(cufileapi.FuncBatchIODestroy)
	if r != cufileapi.Success {
		return
	}
	defer l.leave()
	l.stats.count(&l.stats.l1.BatchDestroyOps, l.batches[h] != nil)
	if l.batches[h] == nil {
		l.report("cuFileBatchIODestroy of %#x, which is not a batch", uintptr(h))
	}
	l.forgetBatch(cufileapi.FuncBatchIODestroy, h)
}

// forgetBatch removes a batch. The machine is locked.
func (l *lib) forgetBatch(by cufileapi.Func, h cufileapi.Batch) {
	b := l.batches[h]
	if b == nil {
		return
	}
	if n := b.waiting + b.running; n > 0 {
		l.report("%s destroyed a batch with %d unfinished transfers: wait for them first", by.Name(), n)
	}
	b.gone = true
	l.reap(b, len(b.done))
	delete(l.batches, h)
}
