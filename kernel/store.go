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
	"time"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/safefile"
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
	tempAge     = time.Hour // of a file that is being written
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

// load returns the binary of the key, if there is a sound one. The binary will run in
// this process, so only this user or root can have written it.
func (s *store) load(key string) ([]byte, bool) {
	if s == nil {
		return nil, false
	}
	d, err := safefile.OpenFolder(s.folder)
	if err != nil {
		return nil, false
	}
	defer d.Close()
	name := key + storeSuffix
	data, st, err := d.Read(name, s.limit)
	if err != nil {
		return nil, false
	}
	rest, ok := bytes.CutPrefix(data, []byte(storeFormat))
	if !ok || len(rest) <= sha256.Size || !bytes.Equal(rest[:sha256.Size], seal(key, rest[sha256.Size:])) {
		_ = d.Remove(name)
		return nil, false
	}
	if now := time.Now(); now.Sub(st.ModTime()) > 24*time.Hour {
		_ = os.Chtimes(filepath.Join(s.folder, name), now, now) // it is in use
	}
	return rest[sha256.Size:], true
}

// save keeps a binary. Two processes that save the same key at once both
// succeed, and either file is right.
func (s *store) save(key string, image []byte) {
	if s == nil || len(image) == 0 || os.MkdirAll(s.folder, 0o700) != nil {
		return
	}
	d, err := safefile.OpenFolder(s.folder)
	if err != nil {
		return
	}
	defer d.Close()
	if d.Replace(key+storeSuffix, 0o600, []byte(storeFormat), seal(key, image), image) != nil { // a full disk, for one
		return
	}
	s.trim(d, time.Now())
}

// trim removes what is old, what killed writers have left, and, while there is
// too much, what was not used for longest.
func (s *store) trim(d *safefile.Folder, now time.Time) {
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
		temp, _ := filepath.Match(safefile.TempPattern, e.Name())
		switch {
		case temp && age > tempAge, filepath.Ext(e.Name()) == storeSuffix && age > storeAge:
			_ = d.Remove(e.Name())
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
		_ = d.Remove(st.Name())
		total -= st.Size()
	}
}
