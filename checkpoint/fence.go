package checkpoint

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/groups"
)

// A fence says which run and epoch of a job saves, so that processes of an earlier epoch, which may run
// on after the job has gone on without them, replace nothing.
//
// Each epoch has a folder of its own for saves that are not complete. The first thing that a Saver does is to
// rename the folders of earlier epochs. A save of an earlier epoch can then not give its folder a name, because
// the rename of a path that does not exist fails. There is no comparison that another process could overtake, and no lock.
type fence struct {
	Job   string `json:"job"`
	Run   string `json:"run"` // each start of the job has another one
	Term  uint64 `json:"term"`
	Epoch uint64 `json:"epoch"`
}

// A fencer is a membership of package cluster.
type fencer interface {
	Job() string
	Fence() (run string, term, epoch uint64)
}

// fenceOf returns the fence of a group, or nil if it was not joined in a job.
func fenceOf(g *comm.Group) *fence {
	r, ok := groups.Of(g).Rendezvous().(fencer)
	if !ok {
		return nil
	}
	f := &fence{Job: r.Job()}
	if f.Run, f.Term, f.Epoch = r.Fence(); f.Run == "" {
		return nil
	}
	return f
}

// earlier reports whether f is an earlier epoch of o's run.
func (f *fence) earlier(o *fence) bool {
	return f.Run == o.Run && (f.Epoch < o.Epoch || f.Epoch == o.Epoch && f.Term < o.Term)
}

// fencePrefix begins the names of the folders of epochs.
const fencePrefix = tempPrefix + "epoch-"

// name returns the name of the folder of an epoch.
func (f *fence) name() string {
	run := sha256.Sum256([]byte(f.Job + "\x00" + f.Run))
	return fmt.Sprintf("%s%s-%d-%d", fencePrefix, hex.EncodeToString(run[:8]), f.Epoch, f.Term)
}

// parse reads the name of the folder of another epoch. Its run is f's, or "" for another run.
func (f *fence) parse(name string) (o fence, ok bool) {
	rest, ok := strings.CutPrefix(name, fencePrefix)
	if !ok {
		return o, false
	}
	run, rest, _ := strings.Cut(rest, "-")
	if n, err := fmt.Sscanf(rest, "%d-%d", &o.Epoch, &o.Term); n != 2 || err != nil {
		return o, false
	}
	if mine, _, _ := strings.Cut(strings.TrimPrefix(f.name(), fencePrefix), "-"); mine == run {
		o.Run = f.Run
	}
	return o, true
}

// claim makes the folder of this epoch, and then ends the saves of earlier epochs and of other runs.
func (f *fence) claim(files fileSystem, folder, nonce string) error {
	own := filepath.Join(folder, f.name())
	if err := files.Mkdir(own); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	entries, err := os.ReadDir(folder)
	if err != nil {
		return err
	}
	for _, e := range entries {
		o, ok := f.parse(e.Name())
		if ok && f.earlier(&o) {
			return errors.Join(fmt.Errorf("epoch %d of the job saves to this folder, and this process is in epoch %d", o.Epoch, f.Epoch), files.RemoveAll(own))
		}
	}
	for _, e := range entries {
		if o, ok := f.parse(e.Name()); !ok || o == (fence{Run: f.Run, Term: f.Term, Epoch: f.Epoch}) {
			continue
		}
		over := filepath.Join(folder, tempPrefix+stepPrefix+"over-"+nonce+strings.TrimPrefix(e.Name(), fencePrefix))
		if err := files.Rename(filepath.Join(folder, e.Name()), over); errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return err
		}
		if err := files.RemoveAll(over); err != nil {
			return err
		}
	}
	return nil
}

// unfinished returns the folder for saves that are not complete.
func (v *Saver) unfinished() string {
	if v.fence == nil {
		return v.folder
	}
	return filepath.Join(v.folder, v.fence.name())
}

// makeTemp makes the folder of a save. It does not make the folder of the epoch, which a later epoch may have renamed.
func (job *saveJob) makeTemp(files fileSystem) error {
	if job.fence == nil {
		return files.MkdirAll(job.temp)
	}
	err := files.Mkdir(job.temp)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

// fenced explains the error of a save that a later epoch of the job, or another run, has ended.
func (v *Saver) fenced(err error) error {
	if err == nil || v.fence == nil || exists(v.unfinished()) {
		return err
	}
	return fmt.Errorf("epoch %d of job %q does not save to this folder any more: a later epoch or another run of the job has begun to: %w", v.fence.Epoch, v.fence.Job, err)
}
