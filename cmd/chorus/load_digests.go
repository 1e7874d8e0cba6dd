package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/internal/safefile"
)

// mostDigests limits the size of a digest file: a checkpoint of 100,000 tensors
// needs about 16 MiB.
const mostDigests = 64 << 20

// checkDigests compares the tensors in the files with the recorded digests.
func checkDigests(ctx context.Context, c *checkpoint.Checkpoint, path string) error {
	text, err := safefile.Read(path, mostDigests)
	if err != nil {
		return fmt.Errorf("--digests: %w", err)
	}
	var recorded map[string]json.RawMessage
	if err := json.Unmarshal(text, &recorded); err != nil {
		return fmt.Errorf("--digests %s: %w", path, err)
	}
	for _, t := range c.Infos() {
		var want string
		var within struct{ SHA256 string }
		if raw, ok := recorded[t.Name]; !ok {
			return fmt.Errorf("--digests %s: no digest for tensor %q of %s", path, t.Name, t.File)
		} else if json.Unmarshal(raw, &want) != nil {
			if err := json.Unmarshal(raw, &within); err != nil {
				return fmt.Errorf("--digests %s: tensor %q: %w", path, t.Name, err)
			}
			want = within.SHA256
		}
		got, err := c.SHA256(ctx, t.Name)
		if err != nil {
			return err
		}
		if !strings.EqualFold(got, want) {
			return fmt.Errorf("--digests %s: tensor %q of %s has SHA-256 %s, want %s as recorded", path, t.Name, t.File, got, want)
		}
	}
	return nil
}
