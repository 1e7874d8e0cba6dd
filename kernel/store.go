package kernel

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/env"
)

// A store keeps compiled binaries in a folder that processes share. A file is
// written under another name and then renamed, so that nobody sees half of it,
// and checked when it is read, so that one which a crash or a disk has spoilt is
// compiled anew. A folder that cannot be used costs a compilation and nothing
// else: no method reports an error, and a nil store keeps nothing.
type store struct {
	folder string
	limit  int64 // bytes of all files; beyond it the longest unused ones go
}

const (
	storeFormat = "chorus kernel 1\n" // the first line of a file
	storeLimit  = 256 << 20
	storeAge    = 90 * 24 * time.Hour // unused for longer, a file goes
	storeSuffix = ".kernel"
	tempPattern = ".new-*" // of a file that is being written
	tempAge     = time.Hour
)

// userStore is the store that the environment chooses, or nil.
func userStore() *store {
	folder := env.KernelCache.Value()
	switch folder {
	case "off":
		return nil
	case "":
		cache, err := os.UserCacheDir()
		if err != nil {
			return nil // there is no home
		}
		folder = filepath.Join(cache, "chorus", "kernels")
	}
	return &store{folder: folder, limit: storeLimit}
}

// A key is the digest of all that a binary depends on.
type key struct{ h hash.Hash }

func newKey(parts ...string) *key {
	k := &key{sha256.New()}
	k.add(parts...)
	return k
}

// add takes texts in with their lengths, so that two lists that differ never
// run together into one text.
func (k *key) add(parts ...string) {
	var n [8]byte
	for _, p := range parts {
		binary.LittleEndian.PutUint64(n[:], uint64(len(p)))
		k.h.Write(n[:])
		k.h.Write([]byte(p))
	}
}

func (k *key) sum() string { return hex.EncodeToString(k.h.Sum(nil)) }

// seal is the digest of a file's contents. It covers the key, so that a file
// under a wrong name is not taken for what its name says.
func seal(key string, image []byte) []byte {
	h := sha256.New()
	h.Write([]byte(key))
	h.Write(image)
	return h.Sum(nil)
}

// load returns the binary of the key, if there is a sound one.
func (s *store) load(key string) ([]byte, bool) {
	if s == nil {
		return nil, false
	}
	path := filepath.Join(s.folder, key+storeSuffix)
	st, err := os.Lstat(path)
	if err != nil || !private(st) {
		return nil, false
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, false
	}
	rest, ok := bytes.CutPrefix(data, []byte(storeFormat))
	if !ok || len(rest) <= sha256.Size || !bytes.Equal(rest[:sha256.Size], seal(key, rest[sha256.Size:])) {
		_ = os.Remove(path)
		return nil, false
	}
	if now := time.Now(); now.Sub(st.ModTime()) > 24*time.Hour {
		_ = os.Chtimes(path, now, now) // it is in use
	}
	return rest[sha256.Size:], true
}

// private reports whether a file is one that only this user can have written:
// what is in it will run in the user's process.
func private(st os.FileInfo) bool {
	sys, ok := st.Sys().(*syscall.Stat_t)
	return ok && st.Mode().IsRegular() && st.Mode().Perm()&0o022 == 0 && int(sys.Uid) == os.Geteuid()
}

// save keeps a binary. Two processes that save the same key at once both
// succeed, and either file is right.
func (s *store) save(key string, image []byte) {
	if s == nil || len(image) == 0 || os.MkdirAll(s.folder, 0o700) != nil {
		return
	}
	f, err := os.CreateTemp(s.folder, tempPattern) // readable by its owner only
	if err != nil {
		return
	}
	for _, part := range [][]byte{[]byte(storeFormat), seal(key, image), image} {
		if _, werr := f.Write(part); werr != nil {
			err = werr
		}
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(s.folder, key+storeSuffix))
	}
	if err != nil { // a full disk, for one
		_ = os.Remove(f.Name())
		return
	}
	s.trim(time.Now())
}

// trim removes what is old, what killed writers have left, and, while there is
// too much, what was not used for longest.
func (s *store) trim(now time.Time) {
	entries, err := os.ReadDir(s.folder)
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
		temp, _ := filepath.Match(tempPattern, e.Name())
		switch {
		case temp && age > tempAge, filepath.Ext(e.Name()) == storeSuffix && age > storeAge:
			_ = os.Remove(filepath.Join(s.folder, e.Name()))
		case filepath.Ext(e.Name()) == storeSuffix:
			kept = append(kept, st)
			total += st.Size()
		}
	}
	slices.SortFunc(kept, func(a, b os.FileInfo) int { return a.ModTime().Compare(b.ModTime()) })
	for _, st := range kept {
		if total <= s.limit {
			return
		}
		_ = os.Remove(filepath.Join(s.folder, st.Name()))
		total -= st.Size()
	}
}
