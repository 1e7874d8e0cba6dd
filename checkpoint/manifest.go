package checkpoint

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/safefile"
)

const (
	manifestName    = "manifest.json"
	manifestVersion = 1
	manifestLimit   = 1 << 30 // bytes that a reader accepts
)

// A manifest describes a checkpoint of a training state. It is the last file that a save writes.
type manifest struct {
	Version int               `json:"version"`
	ID      string            `json:"id"` // of the save
	Step    int64             `json:"step"`
	Fence   *fence            `json:"fence,omitempty"` // of the job that saved it; nil without one, and in older checkpoints
	Ranks   int               `json:"ranks"`
	Block   int64             `json:"block"`  // bytes of a part that have a digest
	Values  []json.RawMessage `json:"values"` // by rank; null if it gave none
	Files   []savedFile       `json:"files"`
	Tensors []savedTensor     `json:"tensors"`         // by name
	Index   string            `json:"index,omitempty"` // SHA-256 of the index for Hugging Face's readers
}

type savedFile struct {
	Name   string `json:"name"`
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"` // of the header; the tensors have their own

	rank int // that writes it
}

type savedTensor struct {
	Name  string      `json:"name"`
	DType string      `json:"dtype"`
	Shape []int       `json:"shape"`
	Rows  int         `json:"rows"` // the tensor seen as a matrix, which the parts cut by columns
	Width int         `json:"width"`
	Parts []savedPart `json:"parts"` // by Start
}

type savedPart struct {
	File   int      `json:"file"`
	Key    string   `json:"key"` // the tensor in the file
	Start  int      `json:"start"`
	Len    int      `json:"len"`
	SHA256 string   `json:"sha256"`           // of the bytes; of Blocks if the part has several
	Blocks []string `json:"blocks,omitempty"` // SHA-256 of each Block bytes

	rank   int      // that writes it
	stored []int    // its shape in the file
	info   partInfo // as the rank has it
}

// check sorts the parts and checks that they cover the tensor once.
func (t *savedTensor) check() error {
	slices.SortFunc(t.Parts, func(a, b savedPart) int { return cmp.Compare(a.Start, b.Start) })
	at := 0
	for _, p := range t.Parts {
		switch {
		case p.Start > at:
			return fmt.Errorf("tensor %q: no rank has elements %d to %d of its rows of %d", t.Name, at, p.Start, t.Width)
		case p.Start < at || p.Len < 0 || p.Len > t.Width-p.Start:
			return fmt.Errorf("tensor %q: two parts have element %d of its rows of %d, or a part ends behind them", t.Name, p.Start, t.Width)
		}
		at += p.Len
	}
	if at != t.Width || len(t.Parts) == 0 {
		return fmt.Errorf("tensor %q: no rank has elements %d to %d of its rows of %d", t.Name, at, t.Width, t.Width)
	}
	return nil
}

// sealed is the content of the file: the manifest with its digest.
type sealed struct {
	SHA256   string          `json:"sha256"` // of the bytes of Manifest
	Manifest json.RawMessage `json:"manifest"`
}

// write writes the manifest to a folder. If all tensors are whole, it first writes the index that
// Hugging Face's readers want.
func (m *manifest) write(fs fileSystem, folder string) error {
	index, err := m.index()
	if err == nil && index != nil {
		m.Index = digest(index)
		err = writeWhole(fs, filepath.Join(folder, indexName), index)
	}
	if err != nil {
		return err
	}
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if text, err = json.Marshal(sealed{digest(text), text}); err != nil {
		return err
	}
	return writeWhole(fs, filepath.Join(folder, manifestName), text)
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// readManifest reads and checks the manifest of a folder. Its error names the file.
func readManifest(folder string) (*manifest, error) {
	path := filepath.Join(folder, manifestName)
	text, err := readIn(folder, manifestName)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: read %s: %w", path, err)
	}
	m, err := decodeManifest(text)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: read %s: %w", path, err)
	}
	return m, nil
}

// readIn reads a file in the folder of a Saver.
func readIn(folder, name string) ([]byte, error) {
	root, err := os.OpenRoot(folder)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	return safefile.ReadIn(root, name, manifestLimit)
}

func decodeManifest(text []byte) (*manifest, error) {
	var s sealed
	if err := json.Unmarshal(text, &s); err != nil {
		return nil, fmt.Errorf("it is not a manifest: %w", err)
	}
	if got := digest(s.Manifest); got != s.SHA256 {
		return nil, fmt.Errorf("SHA-256 of the manifest is %s, and it says %q: the file was damaged", got, s.SHA256)
	}
	m := new(manifest)
	if err := json.Unmarshal(s.Manifest, m); err != nil {
		return nil, fmt.Errorf("it is not a manifest: %w", err)
	}
	return m, m.check()
}

// check checks what a manifest says about itself.
func (m *manifest) check() error {
	if m.Version != manifestVersion {
		return fmt.Errorf("it has version %d: this library reads version %d", m.Version, manifestVersion)
	}
	if m.Ranks < 1 || len(m.Values) > m.Ranks || len(m.Files) == 0 || m.Step < 0 {
		return errors.New("it has no files or no ranks, a negative step, or more values than ranks")
	}
	for _, f := range m.Files {
		if f.Name != filepath.Base(f.Name) || !filepath.IsLocal(f.Name) {
			return fmt.Errorf("file %q is outside of the folder", f.Name)
		}
	}
	for i := range m.Tensors {
		if err := m.Tensors[i].checkRead(len(m.Files)); err != nil {
			return err
		}
	}
	return nil
}

func (t *savedTensor) checkRead(files int) error {
	format, err := safetensors.ParseDType(t.DType)
	if err != nil {
		return fmt.Errorf("tensor %q: %w", t.Name, err)
	}
	for _, d := range t.Shape {
		if d < 0 {
			return fmt.Errorf("tensor %q has shape %v", t.Name, t.Shape)
		}
	}
	if !fits(t.Shape, max(format.Bits()/8, 1)) {
		return fmt.Errorf("tensor %q of shape %v is larger than any memory", t.Name, t.Shape)
	}
	n := int64(product(t.Shape))
	if t.Rows < 0 || t.Width < 0 || n > 0 && (t.Rows == 0 || int64(t.Width) != n/int64(t.Rows) || n%int64(t.Rows) != 0) || n == 0 && t.Rows != 0 && t.Width != 0 {
		return fmt.Errorf("tensor %q of shape %v is not %d rows of %d", t.Name, t.Shape, t.Rows, t.Width)
	}
	for _, p := range t.Parts {
		if p.File < 0 || p.File >= files {
			return fmt.Errorf("tensor %q is in file %d of %d", t.Name, p.File, files)
		}
	}
	return t.check()
}
