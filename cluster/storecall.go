package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
)

// Set gives key a value, which is copied before Set returns. It returns when
// the coordinator has it. Keys and values have the limits MaxKeyBytes and
// MaxValueBytes, and all together MaxStoreBytes.
func (s *Session) Set(ctx context.Context, key string, value []byte) error {
	if value == nil {
		value = []byte{}
	}
	_, err := s.do(ctx, "set", key, call{op: opSet, fields: [][]byte{[]byte(key), value}})
	return err
}

// Get returns the value of key, and waits until it has one. The caller owns the
// result.
func (s *Session) Get(ctx context.Context, key string) ([]byte, error) {
	r, err := s.do(ctx, "get", key, call{op: opGet, fields: [][]byte{[]byte(key)}})
	if err != nil {
		return nil, err
	}
	if len(r.fields) != 1 {
		return nil, &StoreError{Op: "get", Key: key, Rank: s.Rank(), Err: errShortCall}
	}
	return bytes.Clone(r.fields[0]), nil
}

// Last is Get that does not end with the session's context: after a loss it still
// reads what was set before, as long as the coordinator is there, which is not for
// long. ctx must end: nothing else bounds the wait for a key that was never set.
func (s *Session) Last(ctx context.Context, key string) ([]byte, error) {
	r, ok := s.store.(*remote)
	if !ok {
		return s.Get(ctx, key)
	}
	e := &StoreError{Op: "get", Key: key, Rank: s.Rank()}
	c := call{op: opGet, fields: [][]byte{[]byte(key)}}
	if checkCall(c) == statusTooLarge {
		e.Err = statusError(statusTooLarge)
		return nil, e
	}
	got, err := r.last(ctx, c)
	switch {
	case err != nil:
		e.Err = err
	case got.op != statusOK:
		e.Err = statusError(got.op)
	case len(got.fields) != 1:
		e.Err = errShortCall
	default:
		return bytes.Clone(got.fields[0]), nil
	}
	return nil, e
}

// Wait returns when all keys have a value.
func (s *Session) Wait(ctx context.Context, keys ...string) error {
	c := call{op: opWait}
	for _, k := range keys {
		c.fields = append(c.fields, []byte(k))
	}
	name := fmt.Sprint(len(keys), " keys")
	if len(keys) > 0 {
		name = keys[0]
	}
	if len(keys) > 1 {
		name = fmt.Sprintf("%s and %d more", clip(keys[0]), len(keys)-1)
	}
	_, err := s.do(ctx, "wait", name, c)
	return err
}

// Add adds delta to the number that key has, or to 0, and returns the sum. It
// is atomic. The value is decimal text, which Get returns and Set may begin.
func (s *Session) Add(ctx context.Context, key string, delta int64) (int64, error) {
	r, err := s.do(ctx, "add", key, call{op: opAdd, n: delta, fields: [][]byte{[]byte(key)}})
	return r.n, err
}

// CompareAndSwap gives key the value next if it has the value old, and reports
// whether it did. It is atomic. A nil old means that key has no value, a nil
// next that it shall have none; an empty value is one.
func (s *Session) CompareAndSwap(ctx context.Context, key string, old, next []byte) (bool, error) {
	r, err := s.do(ctx, "compare-and-swap", key, call{op: opSwap, fields: [][]byte{[]byte(key), old, next}})
	return r.n == 1, err
}

// Delete removes key and reports whether it had a value.
func (s *Session) Delete(ctx context.Context, key string) (bool, error) {
	r, err := s.do(ctx, "delete", key, call{op: opDelete, fields: [][]byte{[]byte(key)}})
	return r.n == 1, err
}

// Barrier waits until all ranks have called Barrier with the same name, which
// may be used again after that. When ctx ends first, the *BarrierError lists
// the ranks that were missing, and this rank no longer counts as having come.
func (s *Session) Barrier(ctx context.Context, name string) error {
	ctx, cancel := s.deadline(ctx)
	defer cancel()
	r, err := s.store.call(ctx, call{op: opBarrier, fields: [][]byte{[]byte(name)}})
	return s.barrierError(name, r, err)
}

// barrierError makes a barrier's reply an error, or nil if it opened.
func (s *Session) barrierError(name string, r call, err error) error {
	e := &BarrierError{Name: name, Rank: s.Rank(), Err: err}
	switch {
	case err == nil && r.op == statusOK:
		return nil
	case r.op == statusAbsent:
		e.Missing = fieldRanks(r.fields)
	case r.op == statusLeft:
		e.Left = fieldRanks(r.fields)
		e.Missing = e.Left
	case err == nil:
		e.Err = statusError(r.op)
	}
	return e
}

// do carries out one call with the default deadline and names it in the error.
func (s *Session) do(ctx context.Context, op, key string, c call) (call, error) {
	ctx, cancel := s.deadline(ctx)
	defer cancel()
	e := &StoreError{Op: op, Key: key, Rank: s.Rank()}
	if checkCall(c) == statusTooLarge { // found before anything is sent
		e.Err = statusError(statusTooLarge)
		return call{}, e
	}
	r, err := s.store.call(ctx, c)
	switch {
	case err != nil && (c.op == opGet || c.op == opWait) && errors.Is(err, context.DeadlineExceeded):
		e.Note, e.Err = "no process has set it", err
	case err != nil:
		e.Err = err
	case r.op != statusOK:
		e.Err = statusError(r.op)
	default:
		return r, nil
	}
	return call{}, e
}

// statusError is the error of a reply's status.
func statusError(status byte) error {
	switch status {
	case statusTooLarge:
		return fmt.Errorf("%w: keys have at most %d bytes, values %d", ErrTooLarge, MaxKeyBytes, MaxValueBytes)
	case statusFull:
		return fmt.Errorf("%w: %d bytes for all keys and values", ErrStoreFull, MaxStoreBytes)
	case statusTooMany:
		return fmt.Errorf("%w: a process waits in at most %d calls, for at most %d keys together", ErrTooLarge, maxWaits, maxWaitKeys)
	case statusNotNumber:
		return ErrNotNumber
	case statusBusy:
		return ErrBusy
	}
	return fmt.Errorf("the coordinator cannot carry out this call (status %d)", status)
}
