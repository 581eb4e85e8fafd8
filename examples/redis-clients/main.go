// go-redis: one check, then three in a pipeline. docs/resp.md says what it prints.
package main

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"
)

func show(answer *redis.Cmd) {
	numbers, err := answer.Int64Slice()
	if err != nil {
		panic(err)
	}
	verdict := "denied"
	if numbers[0] == 1 {
		verdict = "allowed"
	}
	fmt.Println(verdict, numbers[2], numbers[3])
}

func main() {
	ctx := context.Background()
	tidegate := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6380"})
	defer tidegate.Close()
	show(tidegate.Do(ctx, "TG.CHECK", "user:7", "3/min"))

	pipeline := tidegate.TxPipeline()
	var answers []*redis.Cmd
	for i := 0; i < 3; i++ {
		answers = append(answers, pipeline.Do(ctx, "TG.CHECK", "user:7", "3/min"))
	}
	if _, err := pipeline.Exec(ctx); err != nil {
		panic(err)
	}
	for _, answer := range answers {
		show(answer)
	}
}
