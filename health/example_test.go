package health_test

import (
	"context"
	"fmt"
	"log"
	"testing/fstest"
	"time"

	"github.com/gochorus/chorus/health"
)

func Example() {
	host, err := health.NewHost()
	if err != nil {
		log.Fatal(err)
	}
	// In a container that mounts the file system of its host, this would be os.DirFS("/host").
	host.Name, host.Root = "n1", fstest.MapFS{}
	host.Env = map[string]string{"NCCL_ALGO": "Ring"}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	checks, err := (&health.Selection{Only: []string{"variables", "xid"}}).Select(health.Checks)
	if err != nil {
		log.Fatal(err)
	}
	for _, r := range health.Run(ctx, host, checks) {
		switch r.Verdict {
		case health.Unknown:
			fmt.Println(r.ID, r.Verdict, r.Cause)
		default:
			fmt.Println(r.ID, r.Verdict, r.Found)
		}
	}
	// Output:
	// xid unknown this host has no NVIDIA GPU
	// variables warn NCCL_ALGO=Ring (the environment)
}
