package safe

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/gochorus/chorus/internal/env"
)

// A Store keeps compiled binaries in a directory that processes share. A file is written
// under a temporary name and then renamed, so that readers never see an incomplete file.
// It is checked when it is read; if a crash or a disk error has corrupted it, it is
// compiled again. If the directory cannot be used, programs are compiled each time: the
// methods return no errors, and a nil store stores nothing.
type Store struct {
	Folder string
	Limit  int64 // total size of the files; beyond it the least recently used files are removed
}

// The properties of stores and their files.
const (
	StoreLimit  = 256 << 20           // of UserStore
	StoreSuffix = ".kernel"           // of a file's name
	storeFormat = "chorus kernel 1\n" // the first line of a file
	storeAge    = 90 * 24 * time.Hour // files unused for longer are removed
	tempAge     = time.Hour           // age of an abandoned temporary file
)

// UserStore returns the store of the environment, or nil.
func UserStore() *Store {
	folder := env.KernelCache.Value()
	switch folder {
	case "off":
		return nil
	case "":
		cache, err := env.UserCacheDir()
		if err != nil {
			return nil // there is no home directory
		}
		folder = filepath.Join(cache, "chorus", "kernels")
	}
	return &Store{Folder: folder, Limit: StoreLimit}
}

// A Key is the digest of all inputs of a binary.
type Key struct{ h hash.Hash }

// NewKey returns the key of some inputs.
func NewKey(parts ...string) *Key {
	k := &Key{sha256.New()}
	k.Add(parts...)
	return k
}

// Add hashes texts with their lengths, so that two different lists never have the same
// hash input.
func (k *Key) Add(parts ...string) {
	var n [8]byte
	for _, p := range parts {
		binary.LittleEndian.PutUint64(n[:], uint64(len(p)))
		k.h.Write(n[:])
		k.h.Write([]byte(p))
	}
}

// Sum returns the digest.
func (k *Key) Sum() string { return hex.EncodeToString(k.h.Sum(nil)) }

// seal returns the digest of a file's contents and its key, so that a renamed
// file is not accepted.
func seal(key string, image []byte) []byte {
	h := sha256.New()
	h.Write([]byte(key))
	h.Write(image)
	return h.Sum(nil)
}

// Load returns the binary for the key, if the store has a valid one. The binary will run
// in this process, so its file must belong to this user or root.
func (s *Store) Load(key string) ([]byte, bool) {
	if s == nil {
		return nil, false
	}
	d, err := OpenFolder(s.Folder)
	if err != nil {
		return nil, false
	}
	defer d.Close()
	name := key + StoreSuffix
	data, st, err := d.Read(name, s.Limit)
	if err != nil {
		return nil, false
	}
	rest, ok := bytes.CutPrefix(data, []byte(storeFormat))
	if !ok || len(rest) <= sha256.Size || !bytes.Equal(rest[:sha256.Size], seal(key, rest[sha256.Size:])) {
		_ = d.Remove(name)
		return nil, false
	}
	if now := time.Now(); now.Sub(st.ModTime()) > 24*time.Hour {
		_ = os.Chtimes(filepath.Join(s.Folder, name), now, now) // mark it as used
	}
	return rest[sha256.Size:], true
}

// Save stores a binary. If two processes save the same key at once, both succeed, and
// either file is correct.
func (s *Store) Save(key string, image []byte) {
	if s == nil || len(image) == 0 || os.MkdirAll(s.Folder, 0o700) != nil {
		return
	}
	d, err := OpenFolder(s.Folder)
	if err != nil {
		return
	}
	defer d.Close()
	if d.Replace(key+StoreSuffix, 0o600, []byte(storeFormat), seal(key, image), image) != nil { // for example if the disk is full
		return
	}
	s.trim(d, time.Now())
}

// trim removes old files and temporary files of killed processes, and, while the total
// size exceeds the limit, the least recently used files.
func (s *Store) trim(d *Folder, now time.Time) {
	entries, err := d.File().ReadDir(-1)
	if err != nil {
		return
	}
	var kept []os.FileInfo
	total := int64(0)
	for _, e := range entries {
		st, err := e.Info()
		if err != nil {
			continue
		}
		age := now.Sub(st.ModTime())
		temp, _ := filepath.Match(TempPattern, e.Name())
		switch {
		case temp && age > tempAge, filepath.Ext(e.Name()) == StoreSuffix && age > storeAge:
			_ = d.Remove(e.Name())
		case filepath.Ext(e.Name()) == StoreSuffix:
			kept = append(kept, st)
			total += st.Size()
		}
	}
	slices.SortFunc(kept, func(a, b os.FileInfo) int { return a.ModTime().Compare(b.ModTime()) })
	for _, st := range kept {
		if total <= s.Limit {
			return
		}
		_ = d.Remove(st.Name())
		total -= st.Size()
	}
}
