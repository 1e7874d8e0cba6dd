package checkpoint

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/poll"
)

const (
	stepPrefix = "step-"
	tempPrefix = ".saving-" // of a folder that is not yet a checkpoint, or not any more
)

func stepName(step int64) string { return fmt.Sprintf("%s%08d", stepPrefix, step) }

// stepOf returns the step of a folder's name.
func stepOf(name string) (int64, bool) {
	digits, ok := strings.CutPrefix(name, stepPrefix)
	step, err := strconv.ParseInt(digits, 10, 64)
	return step, ok && err == nil && step >= 0 && stepName(step) == name
}

// finish completes a save when the files of this process are written.
func (v *Saver) finish(job *saveJob, errs []error) {
	err := v.report(job, errs)
	if v.root {
		if err == nil {
			err = v.commit(job)
		}
		err = v.fenced(err)
		if err != nil {
			err = errors.Join(err, v.giveUp(job, err))
		}
	} else if err == nil {
		err = v.awaitRoot(job)
	} else if errors.Is(err, fs.ErrNotExist) { // only the first process removes files
		err = v.rootGaveUp(job)
	}
	job.err = err
	v.mu.Lock()
	if err != nil {
		v.pending = fmt.Errorf("checkpoint: save step %d to %s: %w", job.step, v.folder, err)
	}
	v.mu.Unlock()
	close(job.done)
}

// decline tells the other processes that this one takes no part in a save.
func (v *Saver) decline(job *saveJob, why error) error {
	switch {
	case len(v.locals) == v.ranks:
		return nil
	case v.root:
		return v.giveUp(job, why)
	}
	err := job.makeTemp(v.fs)
	for _, l := range v.locals {
		if err == nil {
			err = writeReport(v.fs, job.temp, l.rank, &rankReport{Error: why.Error()})
		}
	}
	return err
}

// report tells the first process of ranks without files, and of errors.
func (v *Saver) report(job *saveJob, errs []error) error {
	err := errors.Join(errs...)
	for i, l := range v.locals {
		if errs[i] == nil && l.file >= 0 {
			continue
		}
		r := rankReport{Value: job.values[i]}
		if errs[i] != nil {
			r.Error = errs[i].Error()
			if v.root {
				continue // it removes all files now
			}
		}
		err = errors.Join(err, job.makeTemp(v.fs), writeReport(v.fs, job.temp, l.rank, &r))
	}
	return err
}

// commit renames the checkpoint to its place when all ranks have written their files.
func (v *Saver) commit(job *saveJob) error {
	m, err := v.collect(job)
	if err != nil {
		return err
	}
	if err := m.write(v.fs, job.temp); err != nil {
		return err
	}
	for rank := range v.ranks {
		if err := v.fs.Remove(filepath.Join(job.temp, reportName(rank))); err != nil {
			return err
		}
	}
	final := filepath.Join(v.folder, stepName(job.step))
	replaces := exists(final)
	if replaces && !isSaved(final) {
		return fmt.Errorf("%s is not a checkpoint, so the save does not replace it: move it", final)
	}
	if err := reveal(v.fs, job.temp, final, replaces); err != nil {
		return err
	}
	return v.retain(job.step)
}

// reveal gives a complete folder its name. A checkpoint that it replaces trades names with it, and
// is then removed.
func reveal(fs fileSystem, temp, final string, replaces bool) error {
	if err := fs.SyncFolder(temp); err != nil {
		return err
	}
	give := fs.Rename
	if replaces {
		give = func(temp, final string) error { return trade(fs, temp, final) }
	}
	if err := give(temp, final); err != nil {
		return err
	}
	if err := fs.SyncFolder(filepath.Dir(final)); err != nil || !replaces {
		return err
	}
	return fs.RemoveAll(temp)
}

// replacedSuffix is in the temporary name of a checkpoint that is being replaced.
const replacedSuffix = "-replaced"

// replacedName returns the temporary name of the checkpoint in the folder final.
func replacedName(final string) string {
	return filepath.Join(filepath.Dir(final), tempPrefix+filepath.Base(final)+replacedSuffix)
}

// finalName returns the final name of a checkpoint that is being replaced,
// given its temporary name.
func finalName(name string) (final string, ok bool) {
	name, temp := strings.CutPrefix(name, tempPrefix)
	final, replaced := strings.CutSuffix(name, replacedSuffix)
	return final, temp && replaced
}

// folderOf returns the folder of a step. It does not give a replaced checkpoint its name back, because a
// save may be about to do the second rename.
func folderOf(folder string, step int64) string {
	final := filepath.Join(folder, stepName(step))
	if old := replacedName(final); !exists(final) && exists(old) {
		return old
	}
	return final
}

// trade lets a complete folder trade names with the checkpoint that it
// replaces. File systems such as NFS cannot do so at once, so the checkpoint
// gets a temporary name first. If the process ends before the new folder has
// its name, Latest opens the checkpoint by its temporary name, and
// removeLeftovers gives the checkpoint its name back.
func trade(fs fileSystem, temp, final string) error {
	err := fs.Exchange(temp, final)
	if !errors.Is(err, unix.EINVAL) && !errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	old := replacedName(final)
	if err := fs.RemoveAll(old); err != nil { // an earlier replacement has failed after its second rename
		return err
	}
	if err := fs.Rename(final, old); err != nil {
		return err
	}
	if err := fs.Rename(temp, final); err != nil {
		return errors.Join(err, fs.Rename(old, final))
	}
	return fs.Rename(old, temp)
}

// collect waits for the messages of all ranks, and puts them into a manifest.
func (v *Saver) collect(job *saveJob) (*manifest, error) {
	m := *v.plan
	m.Fence, m.ID, m.Step, m.Values = v.fence, job.id, job.step, make([]json.RawMessage, v.ranks)
	m.Files, m.Tensors = slices.Clone(m.Files), slices.Clone(m.Tensors)
	digests := make([]map[string][]string, v.ranks)
	deadline := time.Now().Add(v.cfg.Timeout)
	headers := map[int]string{}
	for rank := range v.ranks {
		r, err := v.awaitReport(job, rank, deadline)
		if err != nil {
			return nil, err
		}
		if r.Error != "" {
			return nil, &RankError{Op: "save", Rank: rank, Reason: r.Error}
		}
		m.Values[rank], headers[rank], digests[rank] = r.Value, r.Header, r.Digests
	}
	for i := range m.Files {
		m.Files[i].SHA256 = headers[m.Files[i].rank]
	}
	for i := range m.Tensors {
		t := &m.Tensors[i]
		t.Parts = slices.Clone(t.Parts)
		for j := range t.Parts {
			if !t.Parts[j].seal(digests[t.Parts[j].rank][t.Parts[j].Key]) { // no other rank speaks for this one
				return nil, fmt.Errorf("rank %d has not written tensor %q", t.Parts[j].rank, t.Parts[j].Key)
			}
		}
	}
	return &m, nil
}

// awaitReport reads the message of a rank. Messages of other processes come by the folder,
// because the group's collectives belong to the training.
func (v *Saver) awaitReport(job *saveJob, rank int, deadline time.Time) (*rankReport, error) {
	path := filepath.Join(job.temp, reportName(rank))
	r := new(rankReport)
	return r, v.await(rank, "written its file", deadline, func() (bool, error) {
		text, err := v.fs.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		if err == nil {
			err = r.decode(text)
		}
		if err != nil {
			return false, fmt.Errorf("%s: %w", path, err)
		}
		return true, nil
	})
}

// awaitRoot waits until the first process has made the checkpoint visible, or has given up. Its
// message goes first, then the folder gets its name.
func (v *Saver) awaitRoot(job *saveJob) error {
	return v.await(0, "completed the checkpoint", time.Now().Add(v.cfg.Timeout), func() (bool, error) {
		_, tempErr := os.Lstat(job.temp)
		if found, failed := v.rootMessage(job); found {
			return false, failed
		}
		if m, err := readManifest(filepath.Join(v.folder, stepName(job.step))); err == nil && m.ID == job.id {
			return true, nil
		}
		if errors.Is(tempErr, fs.ErrNotExist) {
			return false, v.rootGaveUp(job)
		}
		return false, nil
	})
}

// await polls until ready returns true or an error, the group breaks, or the deadline passes.
// done says what the caller awaits from the rank.
func (v *Saver) await(rank int, done string, deadline time.Time, ready func() (bool, error)) error {
	for wait := time.Millisecond; ; wait = min(2*wait, 200*time.Millisecond) {
		if ok, err := ready(); ok || err != nil {
			return err
		}
		if err := v.broken(); err != nil {
			return fmt.Errorf("rank %d has not %s: %w", rank, done, err)
		}
		if time.Now().After(deadline) {
			return &RankError{Op: "save", Rank: rank, Reason: fmt.Sprintf("it has not %s after %v: the rank may be lost, or its process does not see %s", done, v.cfg.Timeout, v.folder)}
		}
		time.Sleep(wait)
	}
}

// giveUp removes the files of a save that has failed. Other processes may make the folder again
// when they write their files, so a message there says why the save has ended.
func (v *Saver) giveUp(job *saveJob, why error) error {
	err := v.fs.RemoveAll(job.temp)
	if len(v.locals) == v.ranks {
		return err
	}
	note := job.makeTemp(v.fs)
	if note == nil {
		note = writeReport(v.fs, job.temp, 0, &rankReport{Error: why.Error()})
	}
	if note != nil { // without a folder the others know that the save has ended
		err = errors.Join(err, note, v.fs.RemoveAll(job.temp))
	}
	return err
}

// rootMessage reports whether the message of the first process is there, and returns its error.
func (v *Saver) rootMessage(job *saveJob) (found bool, failed error) {
	text, err := v.fs.ReadFile(filepath.Join(job.temp, reportName(0)))
	r := new(rankReport)
	if err != nil || r.decode(text) != nil {
		return false, nil
	}
	if r.Error != "" {
		return true, &RankError{Op: "save", Rank: 0, Reason: r.Error}
	}
	return true, nil
}

// noticeTime is how much later than rank 0 this process may notice why the save has ended.
const noticeTime = 10 * time.Second

// rootGaveUp returns why the first process has removed the files of a save.
func (v *Saver) rootGaveUp(job *saveJob) error {
	var cause error
	poll.UntilNoLaterThan(noticeTime, func() bool {
		if _, cause = v.rootMessage(job); cause == nil {
			cause = v.broken()
		}
		return cause != nil
	})
	if cause != nil {
		return fmt.Errorf("rank 0 has not completed the checkpoint: %w", cause)
	}
	return &RankError{Op: "save", Rank: 0, Reason: "it has not completed the checkpoint: its error says why"}
}

// broken returns why the group is broken, or nil. A rank that is lost leaves no message, but it
// breaks the group. A group that this process has closed is not broken.
func (v *Saver) broken() error {
	if err := v.group.Err(); errors.Is(err, comm.ErrBroken) {
		return err
	}
	return nil
}

// index returns the index, or nil if a tensor has several parts.
func (m *manifest) index() ([]byte, error) {
	shards := make([]safetensors.Shard, len(m.Files))
	for i, f := range m.Files {
		shards[i].File = f.Name
	}
	for _, t := range m.Tensors {
		format, err := safetensors.ParseDType(t.DType)
		if err != nil {
			return nil, err
		}
		if len(t.Parts) != 1 || t.Parts[0].Key != t.Name {
			return nil, nil
		}
		of := &shards[t.Parts[0].File]
		of.Tensors = append(of.Tensors, safetensors.Tensor{Name: t.Name, DType: format, Shape: t.Shape})
	}
	x, err := safetensors.NewIndex(shards)
	if err != nil {
		return nil, err
	}
	var text bytes.Buffer
	if err := x.Write(&text); err != nil {
		return nil, err
	}
	return text.Bytes(), nil
}

// retain removes old checkpoints by the policy. A folder is renamed before its
// files go, so that Latest never sees a checkpoint without some of its files.
func (v *Saver) retain(newest int64) error {
	if v.cfg.KeepLast == 0 {
		return nil
	}
	steps, err := stepsIn(v.folder)
	if err != nil {
		return err
	}
	kept := 0
	for _, s := range slices.Backward(steps) {
		if s > newest { // of another run, or damaged: this run has resumed from an earlier one
			continue
		}
		if kept < v.cfg.KeepLast || v.cfg.KeepEvery > 0 && s%v.cfg.KeepEvery == 0 {
			kept++
			continue
		}
		if err := v.removeStep(s); err != nil {
			return err
		}
	}
	return nil
}

// removeStep removes the checkpoint of a step, and before it the one that it has replaced, if that is still
// there: without the checkpoint it would count as the step.
func (v *Saver) removeStep(step int64) error {
	final := filepath.Join(v.folder, stepName(step))
	old := filepath.Join(v.unfinished(), tempPrefix+stepName(step)+"-old-"+v.nonce)
	for _, path := range []string{replacedName(final), final} {
		if !exists(path) {
			continue
		}
		if err := v.fs.Rename(path, old); err != nil {
			return err
		}
		if err := v.fs.RemoveAll(old); err != nil {
			return err
		}
	}
	return nil
}

// stepsIn returns the steps that folderOf has folders of, the oldest first.
func stepsIn(folder string) ([]int64, error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, err
	}
	var steps []int64
	for _, e := range entries {
		name := e.Name()
		if final, replaced := finalName(name); replaced {
			name = final
		}
		if step, ok := stepOf(name); ok && e.IsDir() {
			steps = append(steps, step)
		}
	}
	slices.Sort(steps)
	return slices.Compact(steps), nil
}

// removeLeftovers removes what earlier jobs have not completed, and gives a checkpoint its name
// back that an earlier job has not replaced.
func removeLeftovers(fs fileSystem, folder string) error {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), tempPrefix+stepPrefix) {
			continue
		}
		remove, left := fs.RemoveAll, filepath.Join(folder, e.Name())
		if step, replaced := finalName(e.Name()); replaced {
			if final := filepath.Join(folder, step); !exists(final) {
				remove = func(old string) error { return fs.Rename(old, final) }
			}
		}
		if err := remove(left); err != nil {
			return err
		}
	}
	return nil
}
