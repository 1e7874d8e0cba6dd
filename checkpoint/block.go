package checkpoint

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
)

// blockBytes is how many bytes of a stored part have a digest, so that an error names the damaged
// block of a large tensor. Tests change it.
var blockBytes = int64(16 << 20)

// seal notes the digests of the part's blocks. It returns false if there are none.
func (p *savedPart) seal(blocks []string) bool {
	switch len(blocks) {
	case 0:
		return false
	case 1:
		p.SHA256, p.Blocks = blocks[0], nil
	default:
		p.SHA256, p.Blocks = digestOf(blocks), blocks
	}
	return true
}

// digestOf returns the digest of digests.
func digestOf(blocks []string) string { return digest([]byte(strings.Join(blocks, ""))) }

// checkBlocks checks that a part of so many bytes has a digest for each block.
func (p *savedPart) checkBlocks(bytes, block int64) error {
	switch {
	case len(p.Blocks) == 0:
		return nil
	case block <= 0 || int64(len(p.Blocks)) != (bytes+block-1)/block:
		return fmt.Errorf("tensor %q of %d bytes has digests of %d blocks of %d bytes", p.Key, bytes, len(p.Blocks), block)
	case digestOf(p.Blocks) != p.SHA256:
		return fmt.Errorf("tensor %q: the digests of its blocks do not have the digest %s", p.Key, p.SHA256)
	}
	return nil
}

// A savedBlock is the bytes of a file that have a digest.
type savedBlock struct {
	key        string
	file       int
	begin, end int64
	want       string
}

// blocks returns all blocks of all parts.
func (s *Saved) blocks() []savedBlock {
	var all []savedBlock
	for i := range s.m.Tensors {
		for j := range s.m.Tensors[i].Parts {
			p := &s.m.Tensors[i].Parts[j]
			at := s.files.where[p.Key]
			t := &s.files.headers[at.file].Tensors[at.tensor]
			b := savedBlock{p.Key, at.file, t.Begin, t.End, p.SHA256}
			if len(p.Blocks) == 0 {
				all = append(all, b)
			}
			for k, want := range p.Blocks {
				b.begin, b.want = t.Begin+int64(k)*s.m.Block, want
				b.end = min(b.begin+s.m.Block, t.End)
				all = append(all, b)
			}
		}
	}
	return all
}

// verifyBlock compares a block with its digest. damage is nil if they are equal.
func (s *Saved) verifyBlock(ctx context.Context, b savedBlock) (damage *TensorError, err error) {
	f, h := s.files.files[b.file], sha256.New()
	tensor := s.files.begin(b.key)
	if err := s.files.hashRun(ctx, h, make([]byte, min(verifyChunk, b.end-b.begin)), b.key, b.begin-tensor, b.end-tensor); err != nil {
		return nil, &TensorError{Op: "verify", Path: f.Path(), Tensor: b.key, Offset: b.begin, Err: err}
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != b.want {
		return &TensorError{Op: "verify", Path: f.Path(), Tensor: b.key, Offset: b.begin,
			Err: fmt.Errorf("SHA-256 of %d bytes is %s, and %s when they were saved: the file was damaged", b.end-b.begin, got, b.want)}, nil
	}
	return nil, nil
}
