package route

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

// tuningForm is the version of the file format.
const tuningForm = 2

// A tuningFile has the Tunings of one or several machines, one for each Site.
type tuningFile struct {
	Form    int       `json:"form"`
	Tunings []*Tuning `json:"tunings"`
}

// TuningFile returns the path of the file that groups use: CHORUS_TUNING_FILE, or
// chorus/tuning.json in the user's cache directory.
func TuningFile() (string, error) {
	if path := env.TuningFile.Value(); path != "" {
		return path, nil
	}
	cache, err := env.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("comm: no place for the tuning: %w: set %s", err, env.TuningFile.Name)
	}
	return filepath.Join(cache, "chorus", "tuning.json"), nil
}

// LoadTuning returns the Tuning for a site from a file, and nil if the file has none for
// the same GPUs and numbers of ranks and processes. It returns an error if the file is
// invalid, or if its Tuning was measured under other conditions, such as another version.
func LoadTuning(path string, at Site) (*Tuning, error) {
	f, err := readTunings(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(f.Tunings, func(t *Tuning) bool { return t.For.matches(at) })
	if i < 0 {
		return nil, nil
	}
	if err := f.Tunings[i].Fits(at); err != nil {
		return nil, fmt.Errorf("comm: the tuning in %s is out of date: %w", path, err)
	}
	return f.Tunings[i], nil
}

// Save writes the Tuning to a file and keeps the Tunings for other sites in it. It
// replaces the file atomically. Several processes may call it at the same time: each waits
// for the lock on the file's directory until ctx ends, but at most ten seconds.
func (t *Tuning) Save(ctx context.Context, path string) error {
	if err := t.Check(); err != nil { // no group could read such a file
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
	f.Tunings = slices.DeleteFunc(f.Tunings, func(other *Tuning) bool { return other.For.matches(t.For) })
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

// CanSave returns why Save would fail for any Tuning, or nil. It creates the directory.
func CanSave(ctx context.Context, path string) error {
	if path == "" {
		return errors.New("comm: write the tuning: no path given")
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

// lockTimeout is the maximum time to wait for the lock.
const lockTimeout = 10 * time.Second

// lockFolder creates a directory if necessary, and locks the file in it against other
// processes until it is closed.
func lockFolder(ctx context.Context, path string) (*safefile.Folder, error) {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return nil, err
	}
	d, err := safefile.OpenFolder(path)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, lockTimeout, fmt.Errorf("another process has locked it for %v: end that process, or use another folder", lockTimeout))
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

// matches reports whether two sites agree except for versions. If at does not have the number
// of hosts, it is from an old version and matches any number.
func (at Site) matches(place Site) bool {
	return at.GPU == place.GPU && at.Ranks == place.Ranks && (at.Hosts == place.Hosts || at.Hosts == 0) &&
		at.Locals == place.Locals && at.Backend == place.Backend
}

// readTunings reads and validates a file.
func readTunings(path string) (*tuningFile, error) {
	data, err := readTrusted(path)
	if err != nil {
		return nil, fmt.Errorf("comm: read the tuning: %w", err)
	}
	f, err := parseTunings(data)
	if err != nil {
		return nil, fmt.Errorf("comm: %s is not a tuning: %w: remove it and measure again with chorus tune, or name another file in %s", path, err, env.TuningFile.Name)
	}
	return f, nil
}

// parseTunings parses and validates the text of a file.
func parseTunings(data []byte) (*tuningFile, error) {
	f := &tuningFile{}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	err := d.Decode(f)
	var first struct{ Form int } // another version may have other fields
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

// tuningBytes is a generous limit of the file size.
const tuningBytes = 16 << 20

// readTrusted reads a tuning file from a directory that other users cannot change. That
// matters because a tuning decides how the ranks exchange data.
func readTrusted(path string) ([]byte, error) {
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
		if slices.ContainsFunc(f.Tunings[:i], func(other *Tuning) bool { return other.For.matches(t.For) }) {
			return fmt.Errorf("it has two tunings for %d ranks of %s", t.For.Ranks, t.For.GPU)
		}
		if err := t.Check(); err != nil {
			return err
		}
	}
	return nil
}
