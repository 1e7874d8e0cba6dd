package alloc

import "testing"

// FuzzParseSettings reads what an environment may have for the allocator's options.
func FuzzParseSettings(f *testing.F) {
	f.Add("max_split_size_mb:128,expandable_segments:True")
	f.Add("roundup_power2_divisions:[256:1,512:2,>:4],garbage_collection_threshold:0.8")
	f.Add("backend:cudaMallocAsync,[")
	f.Fuzz(func(t *testing.T, s string) { _, _ = ParseSettings(s) })
}
