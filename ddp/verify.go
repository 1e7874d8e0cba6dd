package ddp

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
)

// A verifier finds numbers that are not finite in the buckets of each step, before they are
// reduced.
type verifier struct{ locals []localVerifier }

type localVerifier struct {
	found   memory.Slice[float32] // by bucket: not 0 if there is one
	buckets []*optim.Grads        // nil for types without such numbers
}

func (r *Reducer) newVerifier(buckets []bucket, parts []contents) (*verifier, error) {
	if !r.cfg.Verify {
		return nil, nil
	}
	v := &verifier{locals: make([]localVerifier, r.g.Locals())}
	for i := range v.locals {
		l := &v.locals[i]
		var err error
		if l.found, err = zeroed[float32](r.g.Stream(i), len(parts)); err != nil {
			return nil, errors.Join(err, v.close())
		}
		for k := range parts {
			grads, err := r.numbers(&buckets[k], parts[k], i)
			if err != nil {
				return nil, errors.Join(err, v.close())
			}
			l.buckets = append(l.buckets, grads)
		}
	}
	return v, nil
}

// numbers returns the gradients in the wire of a bucket, without the gaps between them, or nil.
func (r *Reducer) numbers(b *bucket, part contents, local int) (*optim.Grads, error) {
	flat, err := part.tensors()
	if err != nil || !isFloat(flat[local].DType()) {
		return nil, err
	}
	views, err := r.views(b, local, flat[local])
	if err != nil {
		return nil, err
	}
	return optim.NewGrads(r.g.Stream(local), views...)
}

// look enqueues the check of bucket k.
func (v *verifier) look(g *comm.Group, k int) error {
	if v == nil {
		return nil
	}
	for i, l := range v.locals {
		if l.buckets[k] == nil {
			continue
		}
		if err := l.buckets[k].Unscale(g.Stream(i), memory.Slice[float32]{}, l.found.Slice(k, k+1)); err != nil {
			return err
		}
	}
	return nil
}

// forget clears the results of a step that ends with another error.
func (v *verifier) forget(g *comm.Group) error {
	var errs []error
	for i, l := range v.locals {
		errs = append(errs, l.found.Zero(g.Stream(i)))
	}
	return errors.Join(errs...)
}

// result waits for the step, and returns an error that names the gradients with numbers that are
// not finite.
func (v *verifier) result(op string, q *queue) error {
	var ranks []string
	for i, l := range v.locals {
		s, host := q.g.Stream(i), make([]float32, l.found.Len())
		if err := errors.Join(l.found.CopyTo(s, host), l.found.Zero(s)); err != nil {
			return fmt.Errorf("ddp: %s: %w", op, err)
		}
		for k, found := range host {
			if found != 0 {
				ranks = append(ranks, fmt.Sprintf("on rank %d an element of gradients %s", q.rank(i), runs(q.buckets[k].grads)))
			}
		}
	}
	if len(ranks) == 0 {
		return nil
	}
	return fmt.Errorf("ddp: %s: %s is infinite or NaN: skip the update on all ranks", op, strings.Join(ranks, "; "))
}

// verified returns the error of the step, which is the same on all ranks with
// ReducerConfig.Verify.
func (r *Reducer) verified(op string, err error) error {
	if r.verifier == nil || r.g.Err() != nil {
		return err
	}
	if err == nil {
		err = r.verifier.result(op, r.queue)
	} else {
		err = errors.Join(err, r.verifier.forget(r.g))
	}
	return agree(context.Background(), r.g, op, arguments{}, err)
}

func (v *verifier) close() error {
	if v == nil {
		return nil
	}
	var errs []error
	for _, l := range v.locals {
		errs = append(errs, l.found.Close())
		for _, x := range l.buckets {
			errs = append(errs, x.Close())
		}
	}
	return errors.Join(errs...)
}
