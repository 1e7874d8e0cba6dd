package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
)

// Set sets the value of key. It copies value before it returns, and returns when
// the coordinator has stored it. The limits are MaxKeyBytes, MaxValueBytes and,
// for the whole store, MaxStoreBytes.
func (s *membership) Set(ctx context.Context, key string, value []byte) error {
	if value == nil {
		value = []byte{}
	}
	_, err := s.do(ctx, "set", key, call{op: opSet, fields: [][]byte{[]byte(key), value}})
	return err
}

// Get waits until key has a value and returns it. The caller owns the result.
func (s *membership) Get(ctx context.Context, key string) ([]byte, error) {
	r, err := s.do(ctx, "get", key, call{op: opGet, fields: [][]byte{[]byte(key)}})
	if err != nil {
		return nil, err
	}
	if len(r.fields) != 1 {
		return nil, &StoreError{Op: "get", Key: key, Rank: s.Rank(), Err: errShortCall}
	}
	return bytes.Clone(r.fields[0]), nil
}

// Last is like Get but does not end with the session's context: after a loss it
// still reads earlier values, while the coordinator exists, which is only for a
// short time. ctx must have an end: nothing else limits the wait for a key
// without a value.
func (s *membership) Last(ctx context.Context, key string) ([]byte, error) {
	r, ok := s.store.(remote)
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

// Wait waits until all keys have values.
func (s *membership) Wait(ctx context.Context, keys ...string) error {
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

// Add atomically adds delta to the number in key, or to 0 if key has no value,
// and returns the sum. The value is decimal text: Get returns it, and Set may set
// the initial value.
func (s *membership) Add(ctx context.Context, key string, delta int64) (int64, error) {
	r, err := s.do(ctx, "add", key, call{op: opAdd, n: delta, fields: [][]byte{[]byte(key)}})
	return r.n, err
}

// CompareAndSwap atomically sets key to next if its value is old, and reports
// whether it did. A nil old means that key must have no value, a nil next deletes
// key; an empty slice is a value.
func (s *membership) CompareAndSwap(ctx context.Context, key string, old, next []byte) (bool, error) {
	r, err := s.do(ctx, "compare-and-swap", key, call{op: opSwap, fields: [][]byte{[]byte(key), old, next}})
	return r.n == 1, err
}

// Delete deletes key and reports whether it had a value.
func (s *membership) Delete(ctx context.Context, key string) (bool, error) {
	r, err := s.do(ctx, "delete", key, call{op: opDelete, fields: [][]byte{[]byte(key)}})
	return r.n == 1, err
}

// Barrier waits until all ranks have called Barrier with the same name. The name
// can be reused afterwards. If ctx ends first, the *BarrierError lists the
// missing ranks, and this rank no longer counts as arrived.
func (s *membership) Barrier(ctx context.Context, name string) error {
	ctx, cancel := s.deadline(ctx)
	defer cancel()
	r, err := s.store.call(ctx, call{op: opBarrier, fields: [][]byte{[]byte(name)}})
	return s.barrierError(name, r, err)
}

// barrierError converts a barrier's reply to an error, or nil if it opened.
func (s *membership) barrierError(name string, r call, err error) error {
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

// do runs one call with the default deadline. Its error describes the call.
func (s *membership) do(ctx context.Context, op, key string, c call) (call, error) {
	ctx, cancel := s.deadline(ctx)
	defer cancel()
	e := &StoreError{Op: op, Key: key, Rank: s.Rank()}
	if checkCall(c) == statusTooLarge { // fail before sending
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

// statusError converts the status of a reply to an error.
func statusError(status byte) error {
	switch status {
	case statusTooLarge:
		return fmt.Errorf("%w: keys have at most %d bytes, values %d", ErrTooLarge, MaxKeyBytes, MaxValueBytes)
	case statusFull:
		return fmt.Errorf("%w: %d bytes for all keys and values", ErrStoreFull, MaxStoreBytes)
	case statusTooMany:
		return fmt.Errorf("%w: a process waits in at most %d calls, for at most %d keys together", ErrTooLarge, maxWaits, maxWaitKeys)
	case statusNotNumber:
		return errNotNumber
	case statusBusy:
		return errBusy
	case statusStale:
		return errStale
	}
	return fmt.Errorf("the coordinator rejected this call (status %d)", status)
}
