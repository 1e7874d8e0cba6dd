package comm

import (
	"context"
	"errors"
	"fmt"

	"github.com/gochorus/chorus/internal/plain"
)

// The ranks of a group over processes leave it together. Each rank writes how it leaves: it shuts the
// group down after its operations have completed, or it closes the group or has failed. Rank 0 reads the
// other ranks' texts and writes one answer, so that the number of reads grows with the number of ranks and not with its
// square.

// shutDown is how a rank leaves whose operations have completed.
const shutDown = "shut down"

func (w *reporter) leaveKey(rank int) string { return fmt.Sprint(w.prefix, "leave/", rank) }

func (w *reporter) readKey(rank int) string { return fmt.Sprint(w.prefix, "leave/read/", rank) }

func (w *reporter) answerKey() string { return w.prefix + "leave/answer" }

// leave writes how a rank leaves. Only the first call has an effect.
func (w *reporter) leave(ctx context.Context, rank int, how string) (err error) {
	w.leaving.Do(func() {
		if rank == 0 && how != shutDown {
			err = w.r.Set(ctx, w.answerKey(), []byte("rank 0 "+how))
			return
		}
		err = w.r.Set(ctx, w.leaveKey(rank), []byte(how))
	})
	return err
}

// awaitOthers waits until all ranks have shut the group down. It returns an error if a rank leaves in another way, or if
// the Rendezvous loses a rank.
func (w *reporter) awaitOthers(ctx context.Context, rank, size int) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	lost := w.r.Context()
	defer context.AfterFunc(lost, func() { cancel(context.Cause(lost)) })()
	if err := w.leave(ctx, rank, shutDown); err != nil {
		return err
	}
	if rank > 0 {
		answer, ok := w.await(ctx, w.answerKey())
		if !ok {
			return context.Cause(ctx)
		}
		_ = w.r.Set(ctx, w.readKey(rank), []byte("read")) // rank 0 waits for it only as long as there is a store
		return errLeft(string(answer))
	}
	answer := shutDown
	for peer := 1; peer < size && answer == shutDown; peer++ {
		how, ok := w.await(ctx, w.leaveKey(peer))
		if !ok {
			return context.Cause(ctx)
		}
		if string(how) != shutDown {
			answer = fmt.Sprintf("rank %d %s", peer, how)
		}
	}
	if err := w.r.Set(ctx, w.answerKey(), []byte(answer)); err != nil {
		return err
	}
	for peer := 1; peer < size && answer == shutDown; peer++ { // the store may end with this process
		if _, ok := w.await(ctx, w.readKey(peer)); !ok {
			break
		}
	}
	return errLeft(answer)
}

// errLeft returns the error for an answer of rank 0.
func errLeft(answer string) error {
	if answer == shutDown {
		return nil
	}
	return errors.New(plain.Text(answer) + " instead of shutting it down")
}
