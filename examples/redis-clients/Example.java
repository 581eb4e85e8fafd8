// Jedis: one check, then three in a pipeline. docs/resp.md says what it prints.
import java.nio.charset.StandardCharsets;
import java.util.List;
import redis.clients.jedis.Jedis;
import redis.clients.jedis.Transaction;
import redis.clients.jedis.commands.ProtocolCommand;

class Example {
  static final ProtocolCommand CHECK = () -> "TG.CHECK".getBytes(StandardCharsets.UTF_8);

  static void show(Object answer) {
    List<?> numbers = (List<?>) answer;
    boolean allowed = (Long) numbers.get(0) == 1;
    System.out.println((allowed ? "allowed " : "denied ") + numbers.get(2) + " " + numbers.get(3));
  }

  public static void main(String[] arguments) {
    try (Jedis tidegate = new Jedis("127.0.0.1", 6380)) {
      show(tidegate.sendCommand(CHECK, "user:7", "3/min"));

      Transaction pipeline = tidegate.multi();
      for (int i = 0; i < 3; i++) pipeline.sendCommand(CHECK, "user:7", "3/min");
      for (Object answer : pipeline.exec()) show(answer);
    }
  }
}
