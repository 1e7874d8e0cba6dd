package comm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/safefile"
)

// tuningForm is the number of the form of the file.
const tuningForm = 2

// A tuningFile has the Tunings of one machine, or several, one for each Site.
type tuningFile struct {
	Form    int       `json:"form"`
	Tunings []*Tuning `json:"tunings"`
}

// TuningFile returns the path of the file that groups go by: CHORUS_TUNING_FILE, or
// chorus/tuning.json in the user's cache folder.
func TuningFile() (string, error) {
	if path := env.TuningFile.Value(); path != "" {
		return path, nil
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("comm: no place for the tuning: %w: set %s", err, env.TuningFile.Name)
	}
	return filepath.Join(cache, "chorus", "tuning.json"), nil
}

// LoadTuning returns the Tuning for a site from a file, and nil if there is none for
// such GPUs, so many ranks and processes. An error says what is wrong with the file, or
// in what the one that is there was measured under other conditions.
func LoadTuning(path string, at Site) (*Tuning, error) {
	f, err := readTunings(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(f.Tunings, func(t *Tuning) bool { return t.For.like(at) })
	if i < 0 {
		return nil, nil
	}
	if err := f.Tunings[i].fits(at); err != nil {
		return nil, fmt.Errorf("comm: the tuning in %s is out of date: %w", path, err)
	}
	return f.Tunings[i], nil
}

// Save writes the Tuning to a file, beside those for other places that are there. It
// replaces a file as a whole or not at all. Several processes may do so at once: each waits
// until no other changes the file's folder, for ten seconds at most, and as long as ctx lets it.
func (t *Tuning) Save(ctx context.Context, path string) error {
	if t == nil || path == "" {
		return refuse("write the tuning", "no tuning or no path given")
	}
	t = t.clone()
	if err := t.check(); err != nil { // which no group could read any more
		return fmt.Errorf("comm: write the tuning: %w", err)
	}
	d, err := lockFolder(ctx, filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("comm: write the tuning: %w", err)
	}
	defer d.Close()
	f, err := readTunings(path)
	if errors.Is(err, fs.ErrNotExist) {
		f = &tuningFile{Form: tuningForm}
	} else if err != nil {
		return err
	}
	f.Tunings = slices.DeleteFunc(f.Tunings, func(other *Tuning) bool { return other.For.like(t.For) })
	f.Tunings = append(f.Tunings, t)
	data, err := json.MarshalIndent(f, "", " ")
	if err != nil {
		return err
	}
	if err := d.Replace(filepath.Base(path), 0o644, data, []byte("\n")); err != nil {
		return fmt.Errorf("comm: write the tuning: %w", err)
	}
	return nil
}

// CanSave returns why Save would fail, whatever is to be saved, or nil. It makes the folder.
func CanSave(ctx context.Context, path string) error {
	if path == "" {
		return refuse("write the tuning", "no path given")
	}
	d, err := lockFolder(ctx, filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("comm: write the tuning: %w", err)
	}
	defer d.Close()
	if _, err := readTunings(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := d.Probe(); err != nil {
		return fmt.Errorf("comm: write the tuning: %w", err)
	}
	return nil
}

// lockPatience is how long one waits for others to write.
const lockPatience = 10 * time.Second

// lockFolder makes a folder, if need be, and keeps other processes from changing the
// file in it until it is closed.
func lockFolder(ctx context.Context, path string) (*safefile.Folder, error) {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return nil, err
	}
	d, err := safefile.OpenFolder(path)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, lockPatience, fmt.Errorf("another process has kept it for %v: end that one, or take another folder", lockPatience))
	defer cancel()
	if err := poll.Until(ctx, func() (bool, error) { return tryLock(d.File()) }); err != nil {
		return nil, errors.Join(&os.PathError{Op: "lock", Path: path, Err: err}, d.Close())
	}
	return d, nil
}

func tryLock(f *os.File) (bool, error) {
	err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) || errors.Is(err, syscall.EINTR) {
		return false, nil
	}
	return err == nil, err
}

// like reports whether a Tuning for a site is for such a place, whatever the versions. One
// that does not say on how many hosts is for any number, and out of date.
func (at Site) like(place Site) bool {
	return at.GPU == place.GPU && at.Ranks == place.Ranks && (at.Hosts == place.Hosts || at.Hosts == 0) &&
		at.Locals == place.Locals && at.Backend == place.Backend
}

// readTunings reads a file and checks it.
func readTunings(path string) (*tuningFile, error) {
	data, err := readOwn(path)
	if err != nil {
		return nil, fmt.Errorf("comm: read the tuning: %w", err)
	}
	f, err := parseTunings(data)
	if err != nil {
		return nil, fmt.Errorf("comm: %s is no tuning: %w: remove it and measure anew with chorus tune, or name another one by %s", path, err, env.TuningFile.Name)
	}
	return f, nil
}

// parseTunings reads the text of a file and checks it.
func parseTunings(data []byte) (*tuningFile, error) {
	f := &tuningFile{}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	err := d.Decode(f)
	var first struct{ Form int } // another form may have other fields
	switch {
	case json.Unmarshal(data, &first) == nil && first.Form != tuningForm:
		err = fmt.Errorf("it is of form %d, and this Chorus knows form %d", first.Form, tuningForm)
	case err != nil:
	case len(bytes.TrimSpace(data[d.InputOffset():])) > 0:
		err = errors.New("there is more behind its end")
	default:
		err = f.check()
	}
	return f, err
}

// tuningBytes is more than any tuning has.
const tuningBytes = 16 << 20

// readOwn reads a file that may be a tuning, from a folder that other users cannot change:
// a tuning decides how the ranks exchange what they have.
func readOwn(path string) ([]byte, error) {
	d, err := safefile.OpenFolder(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer d.Close()
	data, _, err := d.Read(filepath.Base(path), tuningBytes)
	return data, err
}

func (f *tuningFile) check() error {
	for i, t := range f.Tunings {
		if t == nil {
			return errors.New("it has a tuning that is null")
		}
		if slices.ContainsFunc(f.Tunings[:i], func(other *Tuning) bool { return other.For.like(t.For) }) {
			return fmt.Errorf("it has two tunings for %d ranks of %s", t.For.Ranks, t.For.GPU)
		}
		if err := t.check(); err != nil {
			return err
		}
	}
	return nil
}

// check reads the choices.
func (t *Tuning) check() error {
	for i := range t.Choices {
		if err := t.Choices[i].read(); err != nil {
			return err
		}
	}
	return nil
}
